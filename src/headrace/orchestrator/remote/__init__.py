"""Actors that are started elsewhere and know nothing but the address of a Redis server."""
