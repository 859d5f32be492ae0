"""One model over many machines: a root that holds the connections, and workers that wait for jobs. No torch is imported here.

root.py      the connections to all workers, the epochs, and the way to the engine that Calls is given
epoch.py     what to do next, when a worker or a rank comes or goes: pure
beats.py     who was heard of last, and when
"""
