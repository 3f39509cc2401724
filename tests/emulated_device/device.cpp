// A device with streams, emulated on the CPU: an accelerator on whose memory the host may not look,
// and whose work is done later, by one thread for each stream, after random delays.
//
// Loaded before torch, it registers itself under torch's CUDA key or, where HETERO_EMULATED names
// anything else, as an out-of-tree accelerator (PrivateUse1). README.md says what is emulated.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

namespace py = pybind11;
using at::Tensor;
using c10::IValue;
using c10::StreamId;
using torch::jit::Stack;

namespace {

// -- settings, from the environment -------------------------------------------------------------

std::string text(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value ? value : otherwise;
}

long number(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value ? long(atof(value)) : otherwise;
}

const std::string kName = text("HETERO_EMULATED", "cuda");
const bool kIsCuda = kName == "cuda";
const c10::DeviceType kType = kIsCuda ? c10::kCUDA : c10::kPrivateUse1;
const c10::DispatchKey kKey = kIsCuda ? c10::DispatchKey::CUDA : c10::DispatchKey::PrivateUse1;
const int kDevices = number("HETERO_EMULATED_DEVICES", 2);
const size_t kBytes = size_t(number("HETERO_EMULATED_MIB", 2048)) << 20;
const long kDelayUs = number("HETERO_EMULATED_DELAY_US", 0);       // the longest delay of a piece of work
const long kDelayEvery = number("HETERO_EMULATED_DELAY_EVERY", 4);  // one piece in this many is delayed
const long kCopyRate = number("HETERO_EMULATED_COPY_RATE", 0);      // bytes a second, each way; 0: no set time
const long kKernelUs = number("HETERO_EMULATED_KERNEL_US", 0);      // of a matrix product; 0: no set time
const size_t kPinnedBytes = size_t(number("HETERO_EMULATED_PINNED_MIB", -1)) << 20;  // by default no limit
const bool kHasTimes = kCopyRate > 0 || kKernelUs > 0;
const long kSeed = number("HETERO_EMULATED_SEED", 0);
const int kPoison = 0xFF;  // of freed and of new memory: NaN in each floating-point type

c10::Device device_of(int index) { return c10::Device(kType, c10::DeviceIndex(index)); }

// -- streams ------------------------------------------------------------------------------------

// The first error of a queued piece of work: as after a device-side assert, nothing works afterwards.
std::mutex error_lock;
std::string error_text;

void check_device() {
  std::lock_guard lock(error_lock);
  TORCH_CHECK(error_text.empty(), "CUDA error: device-side assert triggered (emulated): ", error_text);
}

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

// One direction of a device's copies: those of different streams take turns.
class CopyEngine {
 public:
  Time take(Time begin, Clock::duration length) {
    std::lock_guard lock(lock_);
    return free_at_ = std::max(begin, free_at_) + length;
  }

 private:
  std::mutex lock_;
  Time free_at_;
};
std::vector<std::array<CopyEngine, 2>> copy_engines(kDevices);  // to the device, to the host

struct Duration {  // of a piece of work; without a length it takes the time that the CPU takes
  Clock::duration length{0};
  CopyEngine* engine = nullptr;
};

Duration duration_of_copy(int device, bool to_host, size_t bytes) {
  if (kCopyRate <= 0) return {};
  return {std::chrono::nanoseconds(long(bytes * 1e9 / kCopyRate)), &copy_engines[device][to_host]};
}

std::atomic<long> lateness_us{0};

// A stream's clock says when its work is done on an ideal device. A piece of work begins on that clock
// when it was given, or when the work before it (or an event it waits for) was done, whichever is last:
// a thread that wakes up late sleeps less the next time.
class Stream {
 public:
  Stream(int device, StreamId id) : random_(kSeed * 1000003 + device * 1009 + id) {
    std::thread([this] { run(); }).detach();
  }

  void submit(std::function<void()> work, bool may_be_late = true, Duration duration = {}) {
    {
      std::lock_guard lock(lock_);
      queue_.push_back({std::move(work), may_be_late, duration, Clock::now()});
      submitted_++;
    }
    wake_.notify_one();
  }

  // Wait for everything that was submitted until now.
  void synchronize() {
    std::unique_lock lock(lock_);
    const auto target = submitted_;
    idle_.wait(lock, [&] { return done_ >= target; });
  }

  bool is_idle() {
    std::lock_guard lock(lock_);
    return done_ >= submitted_;
  }

  // For the stream's own work.
  Time clock() const { return clock_; }
  void advance(Time until) { clock_ = std::max(clock_, until); }

 private:
  struct Work {
    std::function<void()> run;
    bool may_be_late;
    Duration duration;
    Time given;
  };

  void run() {
    prctl(PR_SET_TIMERSLACK, 1);  // ns: sleep no longer than told
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    for (;;) {
      Work next;
      {
        std::unique_lock lock(lock_);
        wake_.wait(lock, [&] { return !queue_.empty(); });
        next = std::move(queue_.front());
        queue_.pop_front();
      }
      if (next.may_be_late && kDelayUs > 0 && random_() % kDelayEvery == 0) usleep(random_() % kDelayUs);
      advance(next.given);
      const auto [length, engine] = next.duration;
      const Time done = engine ? engine->take(clock_, length) : clock_ + length;
      // So that races show, copies are made at the end of their time, products at its begin or its end.
      if (engine || (length.count() > 0 && random_() % 2)) std::this_thread::sleep_until(done);
      try {
        next.run();
      } catch (const std::exception& error) {
        std::lock_guard lock(error_lock);
        if (error_text.empty()) error_text = error.what();
      }
      next.run = nullptr;
      pass(done, next);
      {
        std::lock_guard lock(lock_);
        done_++;
      }
      idle_.notify_all();
    }
  }

  void pass(Time done, const Work& work) {
    advance(done);
    if (work.duration.length.count() > 0) {
      std::this_thread::sleep_until(done);
      const long late = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - done).count();
      if (late > lateness_us) lateness_us = late;
    } else if (work.may_be_late) {
      advance(kKernelUs > 0 ? done + std::chrono::microseconds(1) : Clock::now());
    }
  }

  std::mutex lock_;
  std::condition_variable wake_, idle_;
  std::deque<Work> queue_;
  Time clock_;
  uint64_t submitted_ = 0, done_ = 0;
  std::minstd_rand random_;
};

std::mutex streams_lock;
std::map<std::pair<int, StreamId>, Stream*> streams;  // never freed: their threads outlive main
std::atomic<StreamId> next_stream{1};

Stream& stream_of(int device, StreamId id) {
  std::lock_guard lock(streams_lock);
  auto& stream = streams[{device, id}];
  if (!stream) stream = new Stream(device, id);
  return *stream;
}

std::vector<Stream*> streams_of(int device) {
  std::lock_guard lock(streams_lock);
  std::vector<Stream*> found;
  for (auto& [key, stream] : streams)
    if (key.first == device) found.push_back(stream);
  return found;
}

thread_local int current_device = 0;
thread_local std::map<int, StreamId> current_streams;

Stream& current_stream(int device) { return stream_of(device, current_streams[device]); }

// -- synchronisations, which are counted --------------------------------------------------------

std::atomic<long> sync_count{0};
PyObject* sync_listener = nullptr;  // called with what waits; what it raises ends the call that waits

void note_sync(const char* what) {
  sync_count++;
  if (!sync_listener) return;
  py::gil_scoped_acquire gil;
  py::reinterpret_borrow<py::function>(sync_listener)(what);
}

void wait_for(Stream& stream) {
  stream.synchronize();
  check_device();
}

// -- memory -------------------------------------------------------------------------------------

// A device's memory, mapped twice: the host may not touch `device_`, where tensors are said to be;
// the streams' threads use `alias_`. Greedy: a freed block is overwritten at once, in the order of
// the stream that it was allocated on, whoever else may still read it.
class Memory {
 public:
  explicit Memory(int device) : index_(device) {
    const int file = memfd_create("emulated device", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, kBytes) == 0, "no memory for an emulated device");
    device_ = map(file, PROT_NONE);
    alias_ = map(file, PROT_READ | PROT_WRITE);
    unused_[0] = kBytes;
  }

  bool holds(const void* pointer) const { return pointer >= device_ && pointer < device_ + kBytes; }

  char* alias(const void* pointer) const {
    return pointer ? alias_ + (static_cast<const char*>(pointer) - device_) : nullptr;
  }

  void* allocate(size_t wanted) {
    if (wanted == 0) return nullptr;
    std::lock_guard lock(lock_);
    const size_t size = (wanted + 511) / 512 * 512;
    const StreamId stream = current_streams[index_];
    collect();
    if (allocated + size > limit) throw_out_of_memory(wanted);
    auto& cached = cache_[{stream, size}];
    char* block = nullptr;
    if (!cached.empty()) {
      block = cached.back();
      cached.pop_back();
    } else {
      block = cut(size);
      if (!block) {
        trim();
        block = cut(size);
      }
      if (!block) throw_out_of_memory(wanted);
      reserved += size;
      peak_reserved = std::max(peak_reserved, reserved);
      memset(alias(block), kPoison, size);
    }
    blocks_[block] = {size, stream, {}};
    allocated += size;
    peak = std::max(peak, allocated);
    return block;
  }

  void free(void* pointer) {
    std::lock_guard lock(lock_);
    const auto found = blocks_.find(static_cast<char*>(pointer));
    if (found == blocks_.end()) return;
    Block block = found->second;
    blocks_.erase(found);
    allocated -= block.size;
    Waiting waiting{static_cast<char*>(pointer), block, std::make_shared<std::atomic<int>>(0)};
    for (StreamId user : block.users) {
      (*waiting.users)++;
      stream_of(index_, user).submit([users = waiting.users] { (*users)--; });
    }
    if (block.users.empty())
      put(waiting);
    else
      waiting_.push_back(waiting);
  }

  void record_use(const void* pointer, StreamId stream) {
    std::lock_guard lock(lock_);
    const auto found = blocks_.find(static_cast<char*>(const_cast<void*>(pointer)));
    if (found != blocks_.end() && found->second.stream != stream) found->second.users.insert(stream);
  }

  void empty_cache() {
    std::lock_guard lock(lock_);
    trim();
  }

  void reset_peak() {
    std::lock_guard lock(lock_);
    peak = allocated;
    peak_reserved = reserved;
  }

  size_t free_bytes() const { return limit > reserved ? limit - reserved : 0; }

  size_t allocated = 0, peak = 0, reserved = 0, peak_reserved = 0;
  size_t limit = kBytes;  // of this process

 private:
  struct Block {
    size_t size;
    StreamId stream;
    std::set<StreamId> users;
  };
  struct Waiting {  // a freed block that other streams still use
    char* pointer;
    Block block;
    std::shared_ptr<std::atomic<int>> users;
  };

  static char* map(int file, int protection) {
    void* mapped = mmap(nullptr, kBytes, protection, MAP_SHARED, file, 0);
    TORCH_CHECK(mapped != MAP_FAILED, "no address space for an emulated device");
    return static_cast<char*>(mapped);
  }

  void put(const Waiting& freed) {
    cache_[{freed.block.stream, freed.block.size}].push_back(freed.pointer);
    char* bytes = alias(freed.pointer);
    const size_t size = freed.block.size;
    stream_of(index_, freed.block.stream).submit([=] { memset(bytes, kPoison, size); }, false);
  }

  void collect() {  // freed blocks whose users are done
    std::vector<Waiting> still;
    for (auto& freed : waiting_) {
      if (*freed.users == 0)
        put(freed);
      else
        still.push_back(freed);
    }
    waiting_ = std::move(still);
  }

  void trim() {  // give cached blocks back
    for (int round = 0; round < 2; round++) {  // what users hold, then the overwriting of it
      for (Stream* stream : streams_of(index_)) stream->synchronize();
      collect();
    }
    for (auto& [key, pointers] : cache_) {
      for (char* pointer : pointers) {
        reserved -= key.second;
        give_back(pointer - device_, key.second);
      }
    }
    cache_.clear();
  }

  char* cut(size_t size) {
    for (auto it = unused_.begin(); it != unused_.end(); ++it) {
      const auto [offset, room] = *it;
      if (room < size) continue;
      unused_.erase(it);
      if (room > size) unused_[offset + size] = room - size;
      return device_ + offset;
    }
    return nullptr;
  }

  void give_back(size_t offset, size_t size) {
    auto it = unused_.emplace(offset, size).first;
    const auto next = std::next(it);
    if (next != unused_.end() && offset + size == next->first) {
      it->second += next->second;
      unused_.erase(next);
    }
    if (it == unused_.begin()) return;
    const auto before = std::prev(it);
    if (before->first + before->second != it->first) return;
    before->second += it->second;
    unused_.erase(it);
  }

  [[noreturn]] void throw_out_of_memory(size_t wanted) {
    char message[256];
    snprintf(message, sizeof message,
             "%s out of memory. Tried to allocate %zu bytes. GPU %d has a total capacity of %.2f MiB of "
             "which %.2f MiB is free. (emulated)",
             kIsCuda ? "CUDA" : kName.c_str(), wanted, index_, kBytes / 1048576.0,
             free_bytes() / 1048576.0);
    C10_THROW_ERROR(OutOfMemoryError, message);
  }

  const int index_;
  char *device_, *alias_;
  std::mutex lock_;
  std::map<size_t, size_t> unused_;  // offset to bytes
  std::map<char*, Block> blocks_;
  std::map<std::pair<StreamId, size_t>, std::vector<char*>> cache_;
  std::vector<Waiting> waiting_;
};

Memory& memory_of(int device) {
  static std::mutex lock;
  static std::map<int, Memory*> all;
  std::lock_guard held(lock);
  auto& memory = all[device];
  if (!memory) memory = new Memory(device);
  return *memory;
}

int device_holding(const void* pointer) {
  for (int device = 0; device < kDevices; device++)
    if (memory_of(device).holds(pointer)) return device;
  TORCH_CHECK(false, "this is no address of an emulated device");
}

void free_block(void* pointer) {
  if (pointer) memory_of(device_holding(pointer)).free(pointer);
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    void* block = memory_of(current_device).allocate(size);
    return {block, block, &free_block, device_of(current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t size) const override {
    Memory& memory = memory_of(device_holding(to));
    char *target = memory.alias(to), *source = memory.alias(from);
    current_stream(device_holding(to)).submit([=] { memcpy(target, source, size); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    for (int device = 0; device < kDevices; device++) memory_of(device).empty_cache();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    memory_of(stream.device_index()).record_use(data.get(), stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = memory_of(device).allocated;
    stats.allocated_bytes[0].peak = memory_of(device).peak;
    stats.reserved_bytes[0].current = memory_of(device).reserved;
    stats.reserved_bytes[0].peak = memory_of(device).peak_reserved;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { memory_of(device).reset_peak(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {memory_of(device).free_bytes(), kBytes};
  }
};
Allocator allocator;

// Pinned memory: in powers of two, kept for good, and reused at once when no copy uses it.
class PinnedMemory final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t wanted) override {
    size_t size = 4096;
    while (size < wanted) size <<= 1;
    std::lock_guard lock(lock_);
    char* block = nullptr;
    for (char* candidate : free_[size])
      if (blocks_[candidate].copies == 0) block = candidate;
    if (block) {
      auto& rest = free_[size];
      rest.erase(std::find(rest.begin(), rest.end(), block));
    } else {
      if (size > kPinnedBytes - std::min(total_, kPinnedBytes)) throw_out_of_memory();
      block = static_cast<char*>(aligned_alloc(4096, size));
      blocks_[block].size = size;
      total_ += size;
    }
    return {block, block, &PinnedMemory::release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &PinnedMemory::release; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  bool holds(const void* pointer) {
    std::lock_guard lock(lock_);
    return find(pointer) != blocks_.end();
  }
  void add_copies(const void* pointer, int number) {  // a block is not handed out while copies use it
    std::lock_guard lock(lock_);
    find(pointer)->second.copies += number;
  }
  size_t total() {
    std::lock_guard lock(lock_);
    return total_;
  }

 private:
  struct Block {
    size_t size = 0;
    int copies = 0;
  };
  static void release(void* block);

  [[noreturn]] static void throw_out_of_memory() {  // as torch, when cudaHostAlloc has no more
    throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 2,
                                "CUDA error: out of memory\ncudaHostAlloc locks no more memory. (emulated)");
  }

  std::map<char*, Block>::iterator find(const void* pointer) {
    auto it = blocks_.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
    if (it == blocks_.begin()) return blocks_.end();
    --it;
    return pointer < it->first + it->second.size ? it : blocks_.end();
  }

  std::mutex lock_;
  std::map<char*, Block> blocks_;
  std::map<size_t, std::vector<char*>> free_;
  size_t total_ = 0;
};
PinnedMemory pinned_memory;

void PinnedMemory::release(void* block) {
  std::lock_guard lock(pinned_memory.lock_);
  char* pointer = static_cast<char*>(block);
  pinned_memory.free_[pinned_memory.blocks_[pointer].size].push_back(pointer);
}

// -- events, devices and streams as torch asks for them -----------------------------------------

class Event {
 public:
  void reach(Time clock) {
    {
      std::lock_guard lock(lock_);
      at_ = kHasTimes ? clock : Clock::now();
      reached_ = true;
    }
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(lock_);
    changed_.wait(lock, [&] { return reached_; });
  }
  bool reached() {
    std::lock_guard lock(lock_);
    return reached_;
  }
  Time at() {
    wait();
    return at_;
  }

 private:
  std::mutex lock_;
  std::condition_variable changed_;
  Time at_;
  bool reached_ = false;
};
using SharedEvent = std::shared_ptr<Event>;

SharedEvent record_on(Stream& stream) {
  auto event = std::make_shared<Event>();
  stream.submit([event, &stream] { event->reach(stream.clock()); }, false);
  return event;
}

void wait_on(Stream& stream, SharedEvent event) {
  stream.submit([event, &stream] { stream.advance(event->at()); }, false);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return device_of(current_device); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(device, current_streams[index(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    return stream(device, next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override {
    return getNewStream(device);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    const auto before = getStream(to.device());
    current_streams[to.device_index()] = to.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    delete static_cast<SharedEvent*>(*event);
    *event = new SharedEvent(record_on(stream_of(stream.device_index(), stream.id())));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait_on(stream_of(stream.device_index(), stream.id()), *static_cast<SharedEvent*>(event));
  }
  bool queryEvent(void* event) const override {
    return !event || (*static_cast<SharedEvent*>(event))->reached();
  }
  void synchronizeEvent(void* event) const override {
    if (event) (*static_cast<SharedEvent*>(event))->wait();
    check_device();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<SharedEvent*>(event);
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(begin && end, "both events must be recorded");
    const auto from = (*static_cast<SharedEvent*>(begin))->at();
    const auto to = (*static_cast<SharedEvent*>(end))->at();
    return std::chrono::duration<double, std::milli>(to - from).count();
  }
  bool queryStream(const c10::Stream& stream) const override {
    return stream_of(stream.device_index(), stream.id()).is_idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    note_sync("a stream's synchronize");
    wait_for(stream_of(stream.device_index(), stream.id()));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    note_sync("a device's synchronize");
    for (Stream* stream : streams_of(device)) wait_for(*stream);
    check_device();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator.recordStream(data, stream);
  }

 private:
  static int index(c10::Device device) { return device.index() < 0 ? current_device : device.index(); }
  static c10::Stream stream(c10::Device device, StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, device_of(index(device)), id);
  }
};

// -- random numbers -----------------------------------------------------------------------------

// A device's generator draws what the CPU's draws from the same seed.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(int device) : GeneratorImpl(device_of(device), c10::DispatchKeySet(kKey)) {}
  void set_current_seed(uint64_t seed) override { cpu->set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return cpu->current_seed(); }
  uint64_t seed() override { return cpu->seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu->get_state(); }
  Generator* clone_impl() const override {
    auto copy = new Generator(device().index());
    copy->cpu = cpu->clone();
    return copy;
  }
  std::shared_ptr<at::CPUGeneratorImpl> cpu = std::make_shared<at::CPUGeneratorImpl>();
};

const at::Generator& default_generator(int device) {
  static const auto all = [] {
    std::vector<at::Generator> made;
    for (int index = 0; index < kDevices; index++) made.push_back(at::make_generator<Generator>(index));
    return made;
  }();
  return all[device < 0 ? current_device : device];
}

at::Generator cpu_copy(at::CPUGeneratorImpl& generator) {
  at::Generator copy = at::detail::createCPUGenerator();
  copy.set_state(at::Tensor(generator.get_state()));
  return copy;
}

// -- copies -------------------------------------------------------------------------------------

bool is_on_device(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

// A device tensor's elements for a stream's thread. Holds no memory, as queued work of a device.
Tensor aliased(const Tensor& tensor) {
  char* bytes = memory_of(tensor.get_device()).alias(tensor.storage().data());
  if (bytes) bytes += tensor.storage_offset() * tensor.itemsize();
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  return at::from_blob(bytes, tensor.sizes(), tensor.strides(), options);
}

Tensor borrowed(const Tensor& tensor) {  // the same for pinned memory
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

const size_t kStagedBytes = 64 << 10;

bool is_queued(const Tensor& host, const Tensor& other, bool non_blocking) {
  return non_blocking && host.scalar_type() == other.scalar_type() && pinned_memory.holds(host.data_ptr());
}

void queue_copy(Stream& stream, Tensor from, Tensor to, void* pinned, Duration duration) {
  pinned_memory.add_copies(pinned, 1);
  auto work = [=] {
    to.copy_(from);
    pinned_memory.add_copies(pinned, -1);
  };
  stream.submit(work, true, duration);
}

void copy_to_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  Stream& stream = current_stream(from.get_device());
  Tensor source = aliased(from), target = borrowed(to);
  const Duration duration = duration_of_copy(from.get_device(), true, to.nbytes());
  if (is_queued(to, from, non_blocking)) {
    queue_copy(stream, source, target, to.data_ptr(), duration);
    return;
  }
  note_sync(non_blocking ? "a copy to pageable memory" : "a copy to the host");
  if (duration.engine) stream.submit([] {}, false, duration);
  wait_for(stream);
  target.copy_(source);
}

void copy_to_device(const Tensor& from, const Tensor& to, bool non_blocking) {
  Stream& stream = current_stream(to.get_device());
  Tensor target = aliased(to);
  const Duration duration = duration_of_copy(to.get_device(), false, to.nbytes());
  if (is_queued(from, to, non_blocking)) {
    queue_copy(stream, borrowed(from), target, from.data_ptr(), duration);
    return;
  }
  Tensor staged = from.clone();  // by the driver, before the call returns
  stream.submit([=] { target.copy_(staged); }, true, duration);
  if (from.dim() == 0) return;
  if (!non_blocking) note_sync("a copy to the device");
  // From pageable memory: what is larger than the driver's own buffers holds the caller until it is sent.
  if (!non_blocking || (duration.engine && to.nbytes() > kStagedBytes)) wait_for(stream);
}

void copy_on_device(const Tensor& from, const Tensor& to) {
  Stream& stream = current_stream(from.get_device());
  Stream& other = current_stream(to.get_device());
  Tensor source = aliased(from), target = aliased(to);
  if (&stream != &other) wait_on(stream, record_on(other));
  stream.submit([=] { target.copy_(source); });
  if (&stream != &other) wait_on(other, record_on(stream));
}

void copy_between(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return;
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  check_device();
  const Tensor source = from.sizes() == to.sizes() ? from : from.expand(to.sizes());
  if (!is_on_device(to))
    copy_to_host(source, to, non_blocking);
  else if (is_on_device(from))
    copy_on_device(source, to);
  else
    copy_to_device(source, to, non_blocking);
}

Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  copy_between(from, self, non_blocking);
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  copy_between(self, to, non_blocking);
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  copy_between(self, to, false);
  return to;
}

at::Scalar local_scalar(const Tensor& self) {
  note_sync("a number's read (item)");
  wait_for(current_stream(self.get_device()));
  return aliased(self).item();
}

// -- tensors without work -----------------------------------------------------------------------

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  auto keys = c10::DispatchKeySet(kKey);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  auto keys = c10::DispatchKeySet(kKey);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

void grow(const c10::Storage& storage, size_t bytes, int device) {
  if (storage.nbytes() >= bytes) return;
  c10::DeviceGuard guard(device_of(device));
  auto larger = allocator.allocate(bytes);
  if (storage.nbytes()) allocator.copy_data(larger.get(), storage.data(), storage.nbytes());
  const_cast<c10::Storage&>(storage).set_data_ptr_noswap(std::move(larger));
  const_cast<c10::Storage&>(storage).set_nbytes(bytes);
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  if (self.sizes() == size) return self;
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  grow(impl->unsafe_storage(), (self.numel() + self.storage_offset()) * self.itemsize(), self.get_device());
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
                    at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr)
    impl->set_sizes_contiguous(size);
  else
    impl->set_sizes_and_strides(size, stride);
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& other) {
  return set_storage(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

Tensor& set_empty(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, &allocator, true);
  return set_storage(self, storage, 0, {0}, {});
}

void record_stream(Tensor& self, at::Stream stream) {
  allocator.recordStream(self.storage().data_ptr(), stream);
}

int64_t plain_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double,
                        bool, std::optional<double>, bool) {
  return 0;  // no fused kernel: matrix products and a softmax
}

// The CPU's formula, with a generator that can be handed on.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (train.has_value() && !*train) return {input.clone(), at::ones_like(input, at::kBool)};
  Tensor kept = at::empty_like(input).bernoulli_(1 - p);
  return {input * (kept / (1 - p)), kept.to(at::kBool)};
}

// -- every other operation ----------------------------------------------------------------------

// The shape of their result, or which elements they change, depends on values: the host waits.
const std::set<std::string> kNeedsValues = {
    "aten::nonzero",       "aten::masked_select",      "aten::_unique2",
    "aten::equal",         "aten::is_nonzero",         "aten::unique_consecutive",
    "aten::unique_dim",    "aten::bincount",           "aten::repeat_interleave",
    "aten::multinomial",   "aten::linalg_lstsq",       "aten::_linalg_check_errors",
};

const std::set<std::string> kProducts = {  // the operations that have a set time
    "aten::mm",  "aten::addmm",  "aten::addmm_",  "aten::_addmm_activation",
    "aten::bmm", "aten::baddbmm", "aten::baddbmm_", "aten::linear",
};

IValue mapped(const IValue& value, const std::function<Tensor(const Tensor&)>& change) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  }
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
      list.push_back(tensor && tensor->defined() ? std::optional<Tensor>(change(*tensor)) : tensor);
    return list;
  }
  if (value.isDevice()) return c10::Device(c10::kCPU);
  return value;
}

Tensor zeros_like_it(const Tensor& tensor) {
  if (!is_on_device(tensor)) return tensor;
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options).zero_();
}

Tensor for_stream(const Tensor& tensor) {
  // A CPU tensor is a number among the arguments, which is passed by value.
  return is_on_device(tensor) ? aliased(tensor) : tensor.clone();
}

Tensor new_like(const Tensor& tensor, int device) {
  auto place = device_of(device);
  return empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), {}, place, {});
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack) : op_(op), stack_(stack) {
    const auto& schema = op.schema();
    arguments_ = torch::jit::pop(*stack, schema.arguments().size());
    random_ = op.hasTag(at::Tag::nondeterministic_seeded);
    device_ = current_device;
    for (const auto& argument : arguments_) look_at(argument);
    for (const auto& result : schema.returns()) makes_tensors_ |= !is_written(result);
    for (const auto& argument : schema.arguments()) is_out_ |= argument.is_out();
  }

  void run() {
    check_device();
    c10::DeviceGuard guard(device_of(device_));
    at::NoGradGuard no_grad;
    if (needs_values_)
      run_now();
    else
      run_later();
  }

 private:
  void look_at(const IValue& argument) {
    const bool is_index = op_.schema().name().rfind("aten::index", 0) == 0 ||
                          op_.schema().name().rfind("aten::_index_put", 0) == 0;
    needs_values_ |= kNeedsValues.count(op_.schema().name()) > 0;
    mapped(argument, [&](const Tensor& tensor) {
      if (is_on_device(tensor)) device_ = tensor.get_device();
      return tensor;
    });
    if (argument.isDevice() && argument.toDevice().type() == kType && argument.toDevice().has_index())
      device_ = argument.toDevice().index();
    if (is_index && argument.isOptionalTensorList()) {
      for (const std::optional<Tensor>& index : argument.toOptionalTensorList())
        needs_values_ |= index && index->defined() &&
                         (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte);
    }
  }

  Stack arguments_for(const std::function<Tensor(const Tensor&)>& change, const at::Generator& generator) {
    Stack made;
    const auto& schema = op_.schema().arguments();
    for (size_t i = 0; i < arguments_.size(); i++) {
      const bool is_generator = random_ && schema[i].name() == "generator";
      made.push_back(is_generator ? IValue(generator) : mapped(arguments_[i], change));
    }
    return made;
  }

  static void call(const c10::OperatorHandle& op, Stack& stack) {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  }

  at::CPUGeneratorImpl& generator() {
    at::Generator used = default_generator(device_);
    for (const auto& argument : arguments_)
      if (argument.isGenerator()) used = argument.toGenerator();
    if (used.device().type() == c10::kCPU) return *at::check_generator<at::CPUGeneratorImpl>(used);
    return *static_cast<Generator*>(used.unsafeGetGeneratorImpl())->cpu;
  }

  // In the stream, from the values that the arguments have then. Before that, the same on zeros: it
  // tells the results' shapes and strides, and draws as many random numbers.
  void run_later() {
    at::Generator drawn, advanced;
    if (random_) {
      drawn = cpu_copy(generator());
      advanced = cpu_copy(generator());
    }
    Stack shapes;
    if (makes_tensors_ || random_ || is_out_) {
      shapes = arguments_for(zeros_like_it, advanced);
      Stack given = shapes;
      call(op_, shapes);
      if (is_out_) resize_outputs(given);
      if (random_) generator().set_state(*advanced.unsafeGetGeneratorImpl()->get_state());
    }
    Stack queued = arguments_for(for_stream, drawn);
    std::vector<Tensor> targets;
    give_results(shapes, targets, [this](const Tensor& shape) { return new_like(shape, device_); });
    const int threads = at::get_num_threads();
    auto work = [op = op_, queued, targets, threads]() mutable {
      if (at::get_num_threads() != threads) at::set_num_threads(threads);
      call(op, queued);
      write(op, queued, targets);
    };
    Duration duration;
    if (kProducts.count(op_.schema().name())) duration.length = std::chrono::microseconds(kKernelUs);
    current_stream(device_).submit(work, true, duration);
  }

  void run_now() {
    note_sync(op_.schema().name().c_str());
    wait_for(current_stream(device_));
    at::Generator drawn = random_ ? cpu_copy(generator()) : at::Generator();
    Stack results = arguments_for(for_stream, drawn);
    call(op_, results);
    if (random_) generator().set_state(*drawn.unsafeGetGeneratorImpl()->get_state());
    std::vector<Tensor> targets;
    give_results(results, targets, [this](const Tensor& shape) { return new_like(shape, device_); });
    write(op_, results, targets);
  }

  void resize_outputs(const Stack& given) {
    for (size_t i = 0; i < arguments_.size(); i++) {
      if (!op_.schema().arguments()[i].is_out() || !arguments_[i].isTensor()) continue;
      const Tensor& out = arguments_[i].toTensor();
      if (is_on_device(out)) resize_(out, given[i].toTensor().sizes(), {});
    }
  }

  // The call's results: arguments that it has written, or new tensors shaped as `shapes`.
  void give_results(const Stack& shapes, std::vector<Tensor>& targets,
                    const std::function<Tensor(const Tensor&)>& make) {
    const auto& returns = op_.schema().returns();
    for (size_t i = 0; i < returns.size(); i++) {
      if (is_written(returns[i])) {
        stack_->push_back(argument_of(returns[i]));
        continue;
      }
      stack_->push_back(mapped(shapes[i], [&](const Tensor& shape) {
        targets.push_back(make(shape));
        return targets.back();
      }));
    }
    for (Tensor& target : targets) target = aliased(target);
  }

  const IValue& argument_of(const c10::Argument& result) const {
    const auto& schema = op_.schema().arguments();
    for (size_t i = 0; i < schema.size(); i++)
      if (is_written(schema[i]) && schema[i].alias_info()->beforeSets() == result.alias_info()->beforeSets())
        return arguments_[i];
    TORCH_CHECK(false, "no argument for a result of ", op_.schema().name());
  }

  static void write(const c10::OperatorHandle& op, const Stack& results, std::vector<Tensor>& targets) {
    auto target = targets.begin();
    const auto& returns = op.schema().returns();
    for (size_t i = 0; i < returns.size(); i++) {
      if (is_written(returns[i])) continue;
      mapped(results[i], [&](const Tensor& result) { return (target++)->copy_(result); });
    }
  }

  c10::OperatorHandle op_;
  Stack* stack_;
  Stack arguments_;
  int device_;
  bool random_ = false, needs_values_ = false, makes_tensors_ = false, is_out_ = false;
};

void any_operation(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

// -- registration -------------------------------------------------------------------------------

template <class Interface>
struct Hooks : Interface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice(device_of(device)); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = current_device;
    if (device >= 0) current_device = device;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return pinned_memory.holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Device getDeviceFromPtr(void* data) const override { return device_of(device_holding(data)); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device : device);
  }
};

struct CudaHooks final : Hooks<at::CUDAHooksInterface> {
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return kDevices; }
  c10::DeviceIndex current_device() const override { return ::current_device; }
  void deviceSynchronize(c10::DeviceIndex device) const override { Guard().synchronizeDevice(device); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
};

struct OutOfTreeHooks final : Hooks<at::PrivateUse1HooksInterface> {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    grow(storage, bytes, storage.device().index());
  }
};

struct Registration {
  Registration() : fallback("_"), kernels("aten") {
    static Guard guard;
    c10::SetAllocator(kType, &allocator);
    at::setHostAllocator(kType, &pinned_memory);
    c10::impl::DeviceGuardImplRegistrar registrar(kType, &guard);
    if (kIsCuda) {
      at::CUDAHooksRegistry()->Register(
          "CUDAHooks", [](at::CUDAHooksArgs) -> std::unique_ptr<at::CUDAHooksInterface> {
            return std::make_unique<CudaHooks>();
          });
    } else {
      at::RegisterPrivateUse1HooksInterface(new OutOfTreeHooks());
    }
    fallback.library.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operation>());
    auto& m = kernels.library;
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("as_strided", [](const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                            std::optional<int64_t> offset) {
      return at::native::as_strided_tensorimpl(self, size, stride, offset);
    });
    m.impl("view", at::native::view);
    m.impl("_reshape_alias", at::native::_reshape_alias);
    m.impl("unfold", at::native::unfold);
    m.impl("view_as_real", at::native::view_as_real);
    m.impl("view_as_complex", at::native::view_as_complex);
    m.impl("resize_", resize_);
    m.impl("set_.source_Storage_storage_offset", set_storage);
    m.impl("set_.source_Tensor", set_tensor);
    m.impl("set_", set_empty);
    m.impl("copy_", copy_);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("_local_scalar_dense", local_scalar);
    m.impl("record_stream", record_stream);
    m.impl("_fused_sdp_choice", plain_attention);
    m.impl("native_dropout", native_dropout);
    compute_as_the_cpu(m);
  }

 private:
  // Where the CPU has a kernel of its own beside torch's composite one, which would go before the
  // fallback: that kernel, so that results are the CPU's to the bit.
  static void compute_as_the_cpu(torch::Library& library) {
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
      if (name.getNamespace() != "aten") continue;
      const auto op = dispatcher.findOp(name);
      if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(kKey)) continue;
      const bool is_composite =
          op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
          op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
          op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
      bool is_view = false;
      for (const auto& result : op->schema().returns())
        is_view |= result.alias_info() != nullptr && !result.alias_info()->isWrite();
      if (!is_composite || is_view || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
      const std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
      library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&any_operation>());
    }
  }

  struct Fragment {
    explicit Fragment(const char* name)
        : library(torch::Library::IMPL, name, std::make_optional(kKey), __FILE__, __LINE__) {}
    torch::Library library;
  };
  Fragment fallback, kernels;
};
Registration* registration = new Registration();

}  // namespace

// Autocast outside torch's own devices is the accelerator's to register: here by CUDA's rules.
namespace at::autocast {
namespace {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define HIGHER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define HIGHER_BY_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(HIGHER)
  AT_FORALL_FP32_SET_OPT_DTYPE(HIGHER_BY_DTYPE)
  AT_FORALL_PROMOTE(WIDEST)
}
}  // namespace
}  // namespace at::autocast

PYBIND11_MODULE(emulated_device, m) {
  at::globalContext().lazyInitDevice(kType);
  m.def("count", [] { return kDevices; });
  m.def("current_device", [] { return current_device; });
  m.def("exchange_device", [](int device) {
    const int before = current_device;
    if (device >= 0) Guard().setDevice(device_of(device));
    return before;
  });
  m.def("current_stream", [](int device) { return current_streams[device]; });
  m.def("exchange_stream", [](int device, StreamId stream) {
    return std::exchange(current_streams[device], stream);
  });
  m.def("synchronize", [](int device) {
    py::gil_scoped_release release;
    Guard().synchronizeDevice(device);
  });
  m.def("memory", [](int device) {
    const Memory& memory = memory_of(device);
    return std::map<std::string, size_t>{{"total", kBytes},
                                         {"free", memory.free_bytes()},
                                         {"allocated", memory.allocated},
                                         {"peak_allocated", memory.peak},
                                         {"reserved", memory.reserved},
                                         {"peak_reserved", memory.peak_reserved}};
  });
  m.def("limit", [](int device, size_t bytes) { memory_of(device).limit = bytes; });
  m.def("reset_peak", [](int device) { memory_of(device).reset_peak(); });
  m.def("drain", [] {  // before the interpreter ends, which queued work may still need
    py::gil_scoped_release release;
    for (int device = 0; device < kDevices; device++)
      for (Stream* stream : streams_of(device)) stream->synchronize();
  });
  m.def("empty_cache", [] {
    py::gil_scoped_release release;
    allocator.emptyCache();
  });
  m.def("generator", [](int device) {
    return py::reinterpret_steal<py::object>(THPGenerator_Wrap(default_generator(device)));
  });
  m.def("pinned", [](size_t size) {
    auto data = std::make_shared<c10::DataPtr>(pinned_memory.allocate(std::max<size_t>(size, 1)));
    auto bytes = at::from_blob(
        data->get(), {int64_t(size)}, [data](void*) {}, at::TensorOptions().dtype(at::kByte));
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(bytes));
  });
  m.def("pinned_bytes", [] { return pinned_memory.total(); });
  m.def("lateness_us", [] { return lateness_us.exchange(0); });
  m.def("syncs", [] { return sync_count.load(); });
  m.def("listen_to_syncs", [](py::object listener) {
    sync_listener = listener.is_none() ? nullptr : listener.release().ptr();
  });
}
