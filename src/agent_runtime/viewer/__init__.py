"""The run viewer: pages over the read model, for people who would rather not read."""
