"""What a patched model is made of while it runs: modules, deferred tensors, their readers, and hooks."""
