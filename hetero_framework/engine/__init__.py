"""One optimizer step over the stages of a plan: opens no socket."""
