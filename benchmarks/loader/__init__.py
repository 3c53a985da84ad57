"""Our loader in other libraries' training loops beside their own, in groups of processes, and after a restart.

loops.py         a loop of a library, fed by its own loader or by ours: runs in an environment of its own
in_loops.py      the rates of these
balance.py       the tokens of ranks, beside what other libraries' samplers and packers give them
group.py         what a group of processes adds that train on the same samples; group_rank.py is one of them
resume.py        how long ranks take to go on after many steps
"""
