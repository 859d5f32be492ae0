"""`windlass launch`: jobs on Slurm, PBS, other machines by ssh, or this one."""
