"""lastcall: is the last attention call worth it?

At which positions of a frozen language model is an optional operation worth calling, can a cheap router
tell, does that hold under a fixed causal budget against a fair control, and is it faster when really run?
"""

__version__ = "0.1.0"
