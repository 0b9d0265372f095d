"""Histories: what clients asked and saw while a server is tormented, and whether that can be right."""
