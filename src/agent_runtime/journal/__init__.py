"""The kernel: the journal of a run, its states, replay, seals, and the port behind which a store stands."""
