"""Presets side by side on the same work, really run or simulated: their figures, a table, a drawing."""
