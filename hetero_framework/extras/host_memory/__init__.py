"""Host memory: layers, optimizer states and stored inputs that visit the device in turn."""
