"""The questions of klgrad asked of a real causal language model. Everything heavy is imported by the modules inside."""
