"""The forms that are recognised and replaced: a file a form, with what the rewritten code calls."""
