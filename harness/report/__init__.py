"""`retire report DIR`: the results of `retire bench`, beside the paper, on one page and as Markdown."""
