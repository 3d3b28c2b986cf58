"""Pure functions over tensors: fragments, codecs, merging, the outer step, adoption.

Apart from everything else because what is computed here must be the same bits on every peer, and can then be checked
without a clock, a socket or a protocol. No function keeps state between calls (scratch buffers aside), touches a
global random generator or logs; `README.md` beside this file has the formulas.
"""
