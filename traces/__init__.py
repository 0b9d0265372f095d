"""Interruptions that agents have recorded, and what is made of them.

Owns: rows of aborted turns and what followed them, from anybody's logs or drawn with a seed.  Must not know: the
server, the engine, how rows are replayed.  Standard library, and `retire.core.errors`.

    rows        one transition as a line of JSON: numbers and words of closed lists
    files       which files are read, and how lines come out of them in constant memory
    skim        JSON that is too large to hold, cut down to what is wanted
    codex  claude  opencode  gemini     one agent's log each, told as events
    turns       events of threads, paired: a turn that was aborted and the next one
    extract     all of these together
    measured  generate      published quantiles, and rows drawn from them
    statistics  command     what rows say; the command line
"""
