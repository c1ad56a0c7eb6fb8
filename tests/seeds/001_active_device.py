from netcl.core.device import device
with device("gpu") as dev:
    # get_active_device() now returns this handle for the current thread.
    ...
# On exit, the previous active device is restored.
