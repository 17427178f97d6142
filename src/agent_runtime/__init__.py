"""An LLM agent's run that survives its worker."""
