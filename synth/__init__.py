"""The synthetic world: autoregressive models small enough that every expectation is exact.

numpy float64 throughout; KL in nats; torch is imported only by the functions that need it.
"""
