"""Where a response learns the tokens of its prompts.

vLLM tokenises deep inside the application; whoever stands before it and wants to know leaves a name here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

told_prompt: ContextVar[Callable[[list[int]], None] | None] = ContextVar("retire_told_prompt", default=None)
"""Called with a prompt's token ids before the engine gets them.  Tasks inherit it from the context they begin in."""
