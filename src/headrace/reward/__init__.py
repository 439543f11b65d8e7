"""The reward plane: turns samples into scores (`pool.build_rewarder` is the way in)."""
