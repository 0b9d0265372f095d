"""For agent runtimes written in Python."""

from retire.client.scope import Chunk, ScopeClient, ServerRefused

__all__ = ["Chunk", "ScopeClient", "ServerRefused"]
