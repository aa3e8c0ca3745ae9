"""Metal's language without Apple's compiler: a parser, the translation to C++, and the strict check.

tokens.py       tokens and attributes of a source
translate.py    a preprocessed source as C++ for the executor (../build.py); cuda/translate.py builds on it
strict.py       whether Apple's compiler would take a source, as far as that can be known
vocabulary.py   the names that Metal sources known to compile use
"""
