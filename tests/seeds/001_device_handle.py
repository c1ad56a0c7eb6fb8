@dataclass
class DeviceHandle:
    platform_name: str # e.g. "NVIDIA CUDA", "Intel(R) OpenCL"
    device_name: str # e.g. "Tesla T4", "Iris Xe"
    backend: str # "cl" or "cpu"
    device_type: str # "gpu" | "cpu" | "accel" | "other"
    context: cl.Context # OpenCL context (None for CPU)
    queue: cl.CommandQueue # OpenCL queue, or a CPUQueue placeholder
