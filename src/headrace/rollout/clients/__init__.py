"""Clients of the HTTP API into episodes: an agent program talks to the model, and its sessions become samples."""
