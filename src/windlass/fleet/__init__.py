"""One model over many machines: a root that holds the connections, and workers that wait for jobs. No torch is imported here.

root.py      the connections to all workers, the epochs, and the way to the engine that Calls is given
epoch.py     what to do next, when a worker or a rank comes or goes: pure
beats.py     who was heard of last, and when
needed.py    what of a checkpoint a rank reads
sending.py   those slices, from the root's files, in pieces
cache.py     the pieces on a worker's disk
replan.py    the port that decides how the machines of an epoch share a model
"""
