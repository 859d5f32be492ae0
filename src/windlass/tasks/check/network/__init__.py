"""Machines together: an agent on each, driven over ssh by lines of JSON; and verdicts on what they measured."""
