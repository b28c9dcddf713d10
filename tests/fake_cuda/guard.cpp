// What a PyTorch build without CUDA lacks: devices, streams and events of the type CUDA, which exist only as vector clocks.
//
// Autograd, torch.futures.Future(devices=...), torch.Stream and DDP's reducer are C++ code that asks a "device guard" for
// streams and events. This one is registered for CUDA. guard.py builds this file and calls its functions.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;

// ---- vector clocks ------------------------------------------------------------------------------------------------

namespace {
using Clock = std::map<StreamId, uint64_t>;  // by stream, the time of its last operation that is known to be over

constexpr StreamId HOST = -1;
constexpr DeviceIndex DEVICES = 8;
constexpr StreamId POOL = 32;  // CUDA's pool has as many streams, and hands them out in turn

std::recursive_mutex mutex;
std::map<StreamId, Clock> clocks;  // of the host and the streams
StreamId next_in_pool = 0;
thread_local DeviceIndex device = 0;
thread_local StreamId current[DEVICES] = {0};

void join(Clock& to, const Clock& from) {
  for (auto [stream, time] : from) to[stream] = std::max(to[stream], time);
}

bool covers(Clock& clock, StreamId stream, uint64_t time) {
  auto found = clock.find(stream);
  return found != clock.end() && found->second >= time;
}

// Make the host wait. Return whether there was something that it had not waited for.
bool wait_on_host(const Clock& clock) {
  Clock before = clocks[HOST];
  join(clocks[HOST], clock);
  return clocks[HOST] != before;
}
}  // namespace

extern "C" {
int64_t fake_device() { return device; }
int64_t fake_current_stream(int64_t d) { return current[d]; }

// Enqueue an operation: it comes after all that the host has waited for. Return its time, its number on the stream.
int64_t fake_launch(int64_t stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  if (stream != HOST) join(clocks[stream], clocks[HOST]);
  return ++clocks[stream][stream];
}

// Whether an operation is over before what a stream, or the host, does next.
int64_t fake_ordered(int64_t earlier, int64_t time, int64_t later) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  return earlier == later || covers(clocks[later], earlier, time) || covers(clocks[HOST], earlier, time);
}

// Make the host wait for a stream, an event or everything. Return whether it had not waited for that before.
int64_t fake_wait(int64_t stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  return wait_on_host(clocks[stream]);
}

int64_t fake_wait_event(int64_t event) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  return event && wait_on_host(*reinterpret_cast<Clock*>(event));
}

int64_t fake_wait_all() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  int64_t waited = 0;
  for (StreamId stream = 0; stream <= POOL; stream++) waited |= fake_wait(stream);
  return waited;
}
}

// ---- the device guard ---------------------------------------------------------------------------------------------

struct FakeGuard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  Device exchangeDevice(Device d) const override {
    auto old = getDevice();
    if (d.has_index()) device = d.index();
    return old;
  }
  Device getDevice() const override { return Device(c10::DeviceType::CUDA, device); }
  void setDevice(Device d) const override { device = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { device = d.index(); }
  DeviceIndex index_of(Device d) const { return d.has_index() ? d.index() : device; }
  Stream stream(StreamId id, Device d) const {
    return Stream(Stream::UNSAFE, Device(c10::DeviceType::CUDA, index_of(d)), id);
  }
  Stream getStream(Device d) const override { return stream(current[index_of(d)], d); }
  Stream getDefaultStream(Device d) const override { return stream(0, d); }
  Stream getNewStream(Device d, int) const override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    return stream(1 + next_in_pool++ % POOL, d);
  }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override {
    auto old = getStream(s.device());
    current[s.device_index()] = s.id();
    return old;
  }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void record(void** event, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    if (!*event) *event = new Clock();
    auto* clock = static_cast<Clock*>(*event);
    *clock = clocks[s.id()];
    join(*clock, clocks[HOST]);
  }
  void block(void* event, const Stream& s) const override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    if (event) join(clocks[s.id()], *static_cast<Clock*>(event));
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Clock*>(event); }
};

C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)

// ---- pinned memory, and what PyTorch asks about devices -----------------------------------------------------------

namespace {
std::map<char*, size_t> pinned;  // address and size

void free_pinned(void* address) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  pinned.erase(static_cast<char*>(address));
  std::free(address);
}

struct PinnedAllocator final : public c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    void* address = std::aligned_alloc(512, (n / 512 + 1) * 512);
    pinned[static_cast<char*>(address)] = n;
    return {address, address, &free_pinned, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
} pinned_allocator;
}  // namespace

struct CUDAHooks : public at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex i) const override { return i == device; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  DeviceIndex getCurrentDevice() const override { return device; }
  DeviceIndex exchangeDevice(DeviceIndex i) const override { return std::exchange(device, i); }
  DeviceIndex maybeExchangeDevice(DeviceIndex i) const override { return std::exchange(device, i); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* address) const override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    auto next = pinned.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    if (next == pinned.begin()) return false;
    --next;
    return address < next->first + std::max<size_t>(next->second, 1);
  }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

// DDP's logger requires a timer for the model's device.
struct FakeTimer final : public c10d::Timer {
  explicit FakeTimer(Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::DeviceType::CUDA, FakeTimer)
}
