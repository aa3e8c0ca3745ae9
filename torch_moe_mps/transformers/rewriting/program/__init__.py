"""The reader of formulas: a module's forward as a straight-line program, what it computes, and patterns."""
