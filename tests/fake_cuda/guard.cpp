// What a PyTorch build without CUDA lacks: devices, streams and events of the type CUDA, which exist only as vector clocks.
//
// Autograd, torch.futures.Future(devices=...) and DDP's reducer are C++ code that asks a "device guard" for streams and
// events. This one is registered for CUDA. Every stream has a vector clock, and so has the host (stream -1): entry i + 1
// is the time of the last operation on stream i that is known to be over. guard.py builds this file and calls it.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;
using Clock = std::vector<uint64_t>;

// ---- vector clocks ------------------------------------------------------------------------------------------------

namespace {
constexpr StreamId HOST = -1;
constexpr size_t POOL = 32;  // CUDA's pool has as many streams, and hands them out in turn

std::recursive_mutex mutex;
std::vector<Clock> clocks(2);  // of the host, then of the streams
std::vector<StreamId> pool;
size_t next_in_pool = 0;
DeviceIndex device_count = 1;
thread_local DeviceIndex device = 0;
thread_local StreamId current[64] = {0};  // by device

Clock& clock_of(StreamId stream) { return clocks.at(stream + 1); }

void join(Clock& to, const Clock& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t i = 0; i < from.size(); i++) to[i] = std::max(to[i], from[i]);
}

bool covers(const Clock& clock, size_t i, uint64_t time) { return clock.size() > i && clock[i] >= time; }
}  // namespace

extern "C" {
int64_t fake_new_stream() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  clocks.emplace_back();
  return static_cast<StreamId>(clocks.size()) - 2;
}

int64_t fake_stream_count() { return static_cast<int64_t>(clocks.size()) - 1; }
int64_t fake_current_stream(int d) { return current[d]; }
void fake_set_stream(int d, int64_t stream) { current[d] = stream; }
int fake_device() { return device; }
void fake_set_device(int d) { device = d; }
void fake_set_device_count(int n) { device_count = n; }

// Enqueue an operation: it comes after all that the host has waited for. Return its time.
uint64_t fake_launch(int64_t stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto& clock = clock_of(stream);
  if (stream != HOST) join(clock, clocks[0]);
  if (clock.size() < size_t(stream) + 2) clock.resize(stream + 2);
  return ++clock[stream + 1];
}

// Whether an operation is over before what a stream, or the host, does next.
int fake_ordered(int64_t earlier, uint64_t time, int64_t later) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  if (earlier == later) return 1;
  return covers(clock_of(later), earlier + 1, time) || covers(clocks[0], earlier + 1, time);
}

// Whether a stream may still have work to do that the host has not waited for.
int fake_busy(int64_t stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto& clock = clock_of(stream);
  for (size_t i = 1; i < clock.size(); i++)
    if (!covers(clocks[0], i, clock[i])) return 1;
  return 0;
}

void fake_join(int64_t from, int64_t to) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  Clock copy = clock_of(from);
  join(clock_of(to), copy);
}

void* fake_event_record(void* event, int64_t stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto* recorded = event ? static_cast<Clock*>(event) : new Clock();
  *recorded = clock_of(stream);
  join(*recorded, clocks[0]);
  return recorded;
}

void fake_event_block(void* event, int64_t stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  if (event) join(clock_of(stream), *static_cast<Clock*>(event));
}

// Whether the host has not waited for an event yet.
int fake_event_busy(void* event) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  if (!event) return 0;
  auto& clock = *static_cast<Clock*>(event);
  for (size_t i = 1; i < clock.size(); i++)
    if (!covers(clocks[0], i, clock[i])) return 1;
  return 0;
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
  Stream getStreamFromGlobalPool(Device d, bool) const override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    if (pool.size() < POOL) pool.push_back(fake_new_stream());
    return stream(pool[next_in_pool++ % POOL], d);
  }
  Stream getNewStream(Device d, int) const override { return stream(fake_new_stream(), d); }
  Stream exchangeStream(Stream s) const override {
    auto old = getStream(s.device());
    current[s.device_index()] = s.id();
    return old;
  }
  DeviceIndex deviceCount() const noexcept override { return device_count; }
  void record(void** event, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    *event = fake_event_record(*event, s.id());
  }
  void block(void* event, const Stream& s) const override { fake_event_block(event, s.id()); }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Clock*>(event); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& s) const override { fake_join(s.id(), HOST); }
  void synchronizeEvent(void* event) const override { fake_event_block(event, HOST); }
  void synchronizeDevice(const DeviceIndex) const override {
    for (StreamId s = 0; s < fake_stream_count(); s++) fake_join(s, HOST);
  }
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
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex i) const override { return i == device; }
  DeviceIndex deviceCount() const override { return device_count; }
  int getNumGPUs() const override { return device_count; }
  DeviceIndex current_device() const override { return device; }
  DeviceIndex getCurrentDevice() const override { return device; }
  void setCurrentDevice(DeviceIndex i) const override { device = i; }
  DeviceIndex exchangeDevice(DeviceIndex i) const override { return std::exchange(device, i); }
  DeviceIndex maybeExchangeDevice(DeviceIndex i) const override { return std::exchange(device, i); }
  void deviceSynchronize(DeviceIndex) const override {}
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
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto from = getTimestamp(start), to = getTimestamp(end);
    return from && to ? std::optional<int64_t>(*to - *from) : std::nullopt;
  }
};

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::DeviceType::CUDA, FakeTimer)
}
