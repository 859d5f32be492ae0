"""Strangers' templates and grammars: rendered and compiled in processes of their own, with limits of time and memory.

pool.py      what a client of an engine asks: fair between its users, answers about grammars kept
offenders.py whose work was ended again and again
lanes.py     who is next: a quick lane, and a slow one for what was too long for it
workers.py   processes, from this side: started, asked, killed
process.py   processes, from inside: a parent that forks workers, their limits
limits.py    memory and variables of such a process
jobs.py      what they are asked, and what they do
"""
