"""Recorded interruptions and what is made of them: extractors, generator, small fixtures.

Holds nothing yet; it is here because the project's top level is fixed.
"""
