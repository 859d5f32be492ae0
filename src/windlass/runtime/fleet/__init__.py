"""One model over many machines: a root that holds the connections, and workers that wait for jobs. No torch is imported here.

protocol/  the authenticated channel between root and worker, and its messages
root/      the root: connections to workers, epochs, the transport to the engine
worker/    the worker: a supervisor of rank processes
transfer/  weights: which slices a rank needs, sending them, the worker's cache
"""
