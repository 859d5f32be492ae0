"""One model over many machines: a root that holds the connections, and workers that wait for jobs. No torch is imported here.

root.py      the connections to all workers, the epochs, and the way to the engine that EngineRequests is given
epoch.py     what to do next, when a worker or a rank comes or goes: pure
member.py    one machine as the root sees it
running.py   one epoch: weights brought, ranks started, all of it ended
client.py    a fleet as a Client
heartstep_times.py where the time of a step goes, from what ranks say they have done: pure
beside.py    a fleet whose first rank is this process
needed.py    what of a checkpoint a rank reads
sending.py   those slices, from the root's files, in pieces
cache.py     the pieces on a worker's disk
local.py     checkpoints that a worker's machine has itself
replan.py    the port that decides how the machines of an epoch share a model
messages.py  what a root and a worker say to each other
channel.py   how they say it: proved both ways, counted, capped
handshake.py how each proves that it knows the secret
secret.py    the file that the secret is in
gate.py      who knocks at a worker's door: strangers are few at a time, soon gone, and without effect
worker.py    a supervisor: waits for a root, does what it says, and ends its ranks when it is lost
config.py what a supervisor has been given
session.py   one root's time with a supervisor
receiving.py the slices that an epoch needs and this machine does not have
ranks.py     the rank processes of an epoch on this machine
probing.py   what a worker's machine has
own.py       the same supervisor for the root's own machine, through memory
board.py     the notes that ranks of an epoch leave for each other, kept by the root
"""
