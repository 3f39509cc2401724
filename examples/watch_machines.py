"""Ask every worker for its machine's load after each step: how to send messages of your own.

    hetero train --config hetero_config.json --import examples/watch_machines.py

Give the same `--import` on every machine. Workers that the coordinator starts on its own machine
get it from there.
"""

import psutil

from hetero_framework import control


@control.on("machine_load")
def machine_load(data):
    """In the worker: answer a request. What is returned travels back."""
    memory = psutil.virtual_memory()
    return {"cpu_percent": psutil.cpu_percent(), "free_gb": round(memory.available / 1e9, 1)}


@control.after_step
def watch(step, cluster):
    """In the coordinator, after each step: ask the workers one by one."""
    for worker in cluster.workers:
        load = cluster.control(worker, "machine_load")
        print(
            f"step {step}, worker {worker}: processor {load['cpu_percent']:.0f} % busy, "
            f"{load['free_gb']} GB free"
        )
