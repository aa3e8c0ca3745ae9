"""Names of transformers, PEFT, TRL and gguf that a release may change; other rooms have them from here."""
