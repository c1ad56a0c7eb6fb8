from netcl.core.device import manager
# Returns the first GPU/CPU/Accelerator that was discovered.
dev = manager.default("auto")
print(dev.platform_name, dev.device_name, dev.backend, dev.device_type)
print(type(dev.queue), type(dev.context))
