"""RETIRE: versioned execution for interruptible agents, on vLLM.

Requests own resources; (scope, epoch) owns authority.  Start reading at ARCHITECTURE.md,
which follows one supersede through the files.
"""

__version__ = "0.1.0"
