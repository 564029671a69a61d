"""How a generation is formed: who takes part, under which plan, from which state, proven before a seat is taken.
No step is taken here.
"""
