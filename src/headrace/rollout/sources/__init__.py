"""Sources of tasks, one file per kind: each turns rows, files or a user's object into tasks."""
