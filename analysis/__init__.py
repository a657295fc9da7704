"""Questions asked of the synthetic world: bias and variance by sampling, tables with provenance, verdicts."""
