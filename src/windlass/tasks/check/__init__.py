"""Will it work, and how long will it take: measurements of machines, disks, networks and models, judged by pure functions."""
