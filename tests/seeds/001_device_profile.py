from netcl.core.capabilities import device_profile
prof = device_profile(queue.device)
if prof.has_fp16:
    # safe to use half / float16 tensors and fp16 kernels
    ...
