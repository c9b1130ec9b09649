"""Jobs: select → train → gate → publish → shadow, in a process of their own, from a queue that survives."""
