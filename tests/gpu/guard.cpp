// What torch's C++ asks of CUDA before it runs a kernel, and a build for CPUs does not have: two devices on which
// nothing ever happens. tests/gpu/simulated_gpu.py compiles this and loads it before torch.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using namespace c10;

struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device at(DeviceIndex index) { return Device(DeviceType::CUDA, index); }
  static DeviceIndex& current() {
    thread_local DeviceIndex index = 0;
    return index;
  }
  Device getDevice() const override { return at(current()); }
  void setDevice(Device device) const override {
    if (device.index() >= 0) current() = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current() = device.index();
  }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  Stream getStream(Device device) const noexcept override {
    return Stream(Stream::DEFAULT, at(device.index() >= 0 ? device.index() : current()));
  }
  Stream exchangeStream(Stream stream) const noexcept override { return getStream(stream.device()); }
  DeviceIndex deviceCount() const noexcept override { return 2; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
extern "C" void simulated_set_device(int index) { Guard::current() = index; }

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at
