"""An endpoint for the `tinker` client: post-training by calls, over the machines of a plan."""
