// A CUDA device in the memory of the host, for a torch that was built without CUDA.
//
//   tensors of "cuda" -> fallback -> the same memory as tensors of the CPU -> a kernel of the CPU -> tensors of "cuda"
//   as a ghost:                      shapes alone (meta tensors)           -> a shape             -> counted, not there
//
// What a GPU would not do is an error or is counted: operands of two devices, memory that is read before it was written
// (it holds NaN), copies that are read before they arrived, and whatever makes the host wait.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace {
using at::Tensor;
using c10::IValue;
using torch::jit::Stack;
using Launch = std::function<void()>;

const c10::Device kDevice(c10::kCUDA, 0);
std::mutex mutex;  // of what follows
bool is_ghost = false;
int (*watcher)(const char*) = nullptr;  // told of each wait of the host; not 0 forbids it

struct Graph {
  std::vector<Launch> launches;
  std::vector<Tensor> made;
};
std::map<int64_t, Graph> graphs;
Graph* capturing = nullptr;

void wait(const std::string& reason) {
  if (watcher) TORCH_CHECK(watcher(reason.c_str()) == 0, "the host may not wait here, and does: ", reason);
}

// --- Memory -----------------------------------------------------------------------------------------------------------

std::atomic<int64_t> in_use{0}, peak{0};

struct Counted {  // bytes of the device, as torch's allocator rounds them
  explicit Counted(size_t size) : size((size + 511) / 512 * 512) {
    int64_t now = in_use += this->size, before = peak;
    while (before < now && !peak.compare_exchange_weak(before, now)) {}
  }
  ~Counted() { in_use -= size; }
  const int64_t size;
};

struct DeviceMemory final : c10::Allocator {
  struct Block {
    Counted counted;
    void* own;
  };
  c10::DataPtr allocate(size_t size) override {
    static std::atomic<uintptr_t> next_address{uintptr_t{1} << 46};
    auto* block = new Block{Counted(size), is_ghost || size == 0 ? nullptr : c10::alloc_cpu(size)};
    void* address = block->own;
    if (address) std::memset(address, 0xFF, size);  // NaN in each type of numbers that has one
    else if (size) address = reinterpret_cast<void*>(next_address.fetch_add(block->counted.size));
    return {address, block, &release, kDevice};
  }
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    if (block->own) c10::free_cpu(block->own);
    delete block;
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    if (!is_ghost) std::memcpy(to, from, size);
  }
} device_memory;

struct PinnedMemory final : c10::Allocator {
  std::map<const char*, size_t> blocks;
  c10::DataPtr allocate(size_t size) override {
    void* address = size ? c10::alloc_cpu(size) : nullptr;
    std::lock_guard guard(mutex);
    if (size) blocks[static_cast<char*>(address)] = size;
    return {address, address, &release, c10::Device(c10::kCPU)};
  }
  static void release(void* address);
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  bool holds(const void* address) {
    std::lock_guard guard(mutex);
    auto after = blocks.upper_bound(static_cast<const char*>(address));
    if (after == blocks.begin()) return false;
    const auto& [begin, size] = *std::prev(after);
    return static_cast<const char*>(address) < begin + size;
  }
} pinned_memory;

void PinnedMemory::release(void* address) {
  std::lock_guard guard(mutex);
  pinned_memory.blocks.erase(static_cast<char*>(address));
  if (address) c10::free_cpu(address);
}

Tensor noted(Tensor made) {
  if (capturing) capturing->made.push_back(made);
  return made;
}

Tensor new_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type) {
  const auto keys = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  return noted(at::detail::empty_strided_generic(sizes, strides, &device_memory, keys, type));
}

// The memory of a tensor of the device, as the CPU sees it; of a ghost the shape.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto options = tensor.options().device(is_ghost ? at::kMeta : at::kCPU);
  if (is_ghost || tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {}, options);
}

// What a kernel made, as the device's from now on.
Tensor on_device(const Tensor& made) {
  if (!made.defined() || made.is_cuda()) return made;
  if (is_ghost || made.numel() == 0) return new_on_device(made.sizes(), made.strides(), made.scalar_type());
  auto counted = std::make_shared<Counted>(made.storage().nbytes());
  auto keep = [made, counted](void*) {};
  const auto options = made.options().device(kDevice);
  return noted(at::from_blob(made.mutable_data_ptr(), made.sizes(), made.strides(), keep, options, kDevice));
}

void resize_storage(const Tensor& tensor, int64_t size) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  auto memory = device_memory.allocate(size);
  device_memory.copy_data(memory.get(), storage->data(), std::min<size_t>(size, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(size);
}

// --- Graphs: what is launched while one is captured is kept, and launched again at each replay --------------------------

void begin_capture(int64_t number) {
  wait("the beginning of a capture");
  capturing = &graphs[number];
}

void end_capture() {  // a capture computes nothing
  for (const auto& tensor : capturing->made) std::memset(tensor.storage().mutable_data(), 0xFF, tensor.storage().nbytes());
  capturing = nullptr;
}

void replay(int64_t number) {
  for (const auto& launch : graphs.at(number).launches) launch();
}

int64_t bytes_of_graph(int64_t number) {
  int64_t size = 0;
  for (const auto& tensor : graphs[number].made) size += tensor.storage().nbytes();
  return size;
}

void forget_graph(int64_t number) { graphs.erase(number); }

// --- Copies: between the device and pinned memory the host need not wait, and sees nothing until it has ------------------

std::vector<std::pair<int64_t, Launch>> arrivals;
int64_t num_departed = 0;

int64_t departed() { return num_departed; }

void arrive(int64_t until) {
  std::vector<Launch> due;
  {
    std::lock_guard guard(mutex);
    std::erase_if(arrivals, [&](auto& arrival) {
      if (arrival.first > until) return false;
      due.push_back(arrival.second);
      return true;
    });
  }
  for (const auto& launch : due) launch();
}

void send(const Tensor& host, const Tensor& device) {
  Tensor content = on_host(device).to(host.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  if (host.is_non_overlapping_and_dense()) std::memset(host.mutable_data_ptr(), 0xFF, host.nbytes());
  std::lock_guard guard(mutex);
  arrivals.emplace_back(++num_departed, [host, content] { host.copy_(content); });
}

Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  const bool is_inside = self.is_cuda() && source.is_cuda();
  const Tensor& host = self.is_cuda() ? source : self;
  if (host.numel() == 0) return self;
  if (!is_inside) {
    const bool is_pinned = pinned_memory.holds(host.const_data_ptr());
    const bool may_go_on = non_blocking && (is_pinned || self.is_cuda());  // pageable memory is staged before it goes
    if (!may_go_on) wait(self.is_cuda() ? "a copy to the device" : "a copy to the host");
    if (!self.is_cuda() && may_go_on && !is_ghost) return send(self, source), self;
  }
  if (is_ghost) {
    if (!self.is_cuda() && self.nbytes() < 65536) self.fill_(1);
    return self;
  }
  Launch launch = [self, source] { on_host(self).copy_(on_host(source)); };
  if (capturing) capturing->launches.push_back(launch);
  launch();
  return self;
}

c10::Scalar item(const Tensor& self) {
  wait("item()");
  return is_ghost ? c10::Scalar(1) : on_host(self).item();
}

// --- Every other operation ---------------------------------------------------------------------------------------------

// Whose results have a size, or are a number, that the host must know (aten/src/ATen/native/cuda).
const std::unordered_set<std::string> kWaits{
    "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::bincount", "aten::histc"};
const std::unordered_set<std::string> kMayMix{"aten::index", "aten::_index_put_impl_"};  // with indices of the host

void each_tensor(const IValue& value, const std::function<void(const Tensor&)>& visit) {
  if (value.isTensor() && value.toTensor().defined()) visit(value.toTensor());
  else if (value.isList() && !value.isIntList() && !value.isDoubleList() && !value.isBoolList())
    for (const IValue& element : value.toListRef()) each_tensor(element, visit);
}

IValue changed(const IValue& value, Tensor (*change)(const Tensor&)) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(is_ghost ? c10::kMeta : c10::kCPU);
  if (!value.isList() || value.isIntList() || value.isDoubleList() || value.isBoolList()) return value;
  auto elements = value.toList();
  c10::impl::GenericList list(elements.elementType());
  for (const IValue element : elements) list.push_back(changed(element, change));
  return list;
}

// A mask is looked through for its places (of what is read, by nonzero), unless one number goes to all of them.
void watch_indices(const std::string& name, c10::ArrayRef<IValue> arguments) {
  const bool looks = name == "aten::_index_put_impl_" && arguments[2].toTensor().numel() != 1;
  each_tensor(arguments[1], [&](const Tensor& index) {
    const bool is_mask = index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
    if (is_mask && looks) wait("an index by a mask");
    if (!index.is_cuda() && !is_mask) wait("an index of the host");
  });
}

void check(const c10::OperatorHandle& operation, c10::ArrayRef<IValue> arguments) {
  const std::string& name = operation.schema().name();
  bool is_here = false, is_elsewhere = false;
  for (const auto& argument : arguments)
    each_tensor(argument, [&](const Tensor& tensor) {
      is_here |= tensor.is_cuda();
      is_elsewhere |= !tensor.is_cuda() && tensor.dim() > 0;
    });
  TORCH_CHECK(!is_here || !is_elsewhere || kMayMix.count(name), "Expected all tensors to be on the same device, but ",
              operation.operator_name(), " was given tensors of cuda and of cpu");
  if (kWaits.count(name)) wait(name.substr(6));
  if (kMayMix.count(name)) watch_indices(name, arguments);
  if (name == "aten::repeat_interleave" && arguments.size() == 2 && arguments[1].isNone()) wait("repeat_interleave without a size");
}

bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// Computes on the stack; what is written in place is returned as it came, and given its size where it had none.
void compute(const c10::OperatorHandle& operation, Stack* stack) {
  const auto& schema = operation.schema();
  const auto& arguments = schema.arguments();
  const auto& returns = schema.returns();
  const bool is_exchange = schema.name().rfind("c10d::", 0) == 0;
  const Stack before(stack->end() - arguments.size(), stack->end());
  auto is_to_grow = [&](size_t i) {
    return is_written(arguments[i]) && before[i].isTensor() && before[i].toTensor().defined() && before[i].toTensor().numel() == 0;
  };
  for (size_t i = 0; i < before.size(); i++) {
    IValue& value = (*stack)[stack->size() - before.size() + i];
    if (is_exchange && is_ghost) continue;
    value = changed(value, on_host);
    if (is_to_grow(i)) value = at::empty({0}, value.toTensor().options());
  }
  const auto key = is_ghost && !is_exchange ? c10::DispatchKey::Meta : c10::DispatchKey::CPU;
  operation.redispatchBoxed(c10::DispatchKeySet(key), stack);
  for (size_t r = 0; r < returns.size(); r++) {
    IValue& value = (*stack)[stack->size() - returns.size() + r];
    const auto* alias = returns[r].alias_info();
    size_t i = alias ? 0 : before.size();
    while (i < before.size() && !(arguments[i].alias_info() && *arguments[i].alias_info() == *alias)) i++;
    if (i == before.size()) {
      value = changed(value, on_device);
      continue;
    }
    if (is_to_grow(i) && value.toTensor().numel()) {
      Tensor grown = before[i].toTensor();
      grown.set_(on_device(value.toTensor()));
    }
    value = before[i];
  }
}

// The tensors of results that were not given.
std::vector<Tensor> made_by(c10::ArrayRef<IValue> results, c10::ArrayRef<IValue> before) {
  std::unordered_set<const void*> given;
  std::vector<Tensor> made;
  for (const auto& argument : before) each_tensor(argument, [&](const Tensor& t) { given.insert(t.unsafeGetTensorImpl()); });
  for (const auto& result : results)
    each_tensor(result, [&](const Tensor& t) {
      if (!given.count(t.unsafeGetTensorImpl())) made.push_back(t);
    });
  return made;
}

void fallback(const c10::OperatorHandle& operation, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = operation.schema();
  const Stack before(stack->end() - schema.arguments().size(), stack->end());
  check(operation, before);
  compute(operation, stack);
  if (!capturing) return;
  const size_t num_results = schema.returns().size();
  const auto made = made_by(c10::ArrayRef<IValue>(stack->data() + stack->size() - num_results, num_results), before);
  capturing->launches.push_back([operation, before, made] {
    Stack again = before;
    compute(operation, &again);
    const auto results = made_by(again, before);
    for (size_t i = 0; i < made.size(); i++) on_host(made[i]).copy_(on_host(results[i]));
  });
}

// --- What torch asks of a device -----------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { wait("a stream"); }
  void synchronizeEvent(void*) const override { wait("an event"); }
  void synchronizeDevice(c10::DeviceIndex) const override { wait("the device"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
  bool isPinnedPtr(const void* address) const override { return pinned_memory.holds(address); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  int getNumGPUs() const override { return 1; }
  void deviceSynchronize(c10::DeviceIndex) const override { wait("the device"); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks)

// --- Operations that are not computed but are about memory -----------------------------------------------------------------

Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<at::Device>,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const auto keys = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  return noted(at::detail::empty_generic(sizes, &device_memory, keys, c10::dtype_or_default(type), format));
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> type,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return new_on_device(sizes, strides, c10::dtype_or_default(type));
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(sizes);
  const size_t needed = (tensor->storage_offset() + tensor->numel()) * tensor->itemsize();
  if (needed > self.storage().nbytes()) resize_storage(self, needed);
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return at::native::set_storage_cpu_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_whole(Tensor& self, at::Storage source) {
  const int64_t length = source.nbytes() / self.itemsize();
  return at::native::set_storage_cpu_(self, std::move(source), 0, {length}, {1});
}

Tensor& set_part(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, sizes, strides);
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  Tensor written = target;
  return copy(written, self, non_blocking);
}

void record_stream(Tensor&, c10::Stream) {}

// Of torch's ways of attention the one that is made of other operations; as a ghost the one that a GPU would choose:
// Flash Attention (1) without a mask, the memory-efficient kernel (2) with as many heads of keys as of queries.
int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor&, const std::optional<Tensor>& mask, double,
                         bool, std::optional<double>, bool) {
  if (!is_ghost) return 0;
  if (!mask && query.scalar_type() != at::kFloat) return 1;
  return query.size(1) == key.size(1) ? 2 : 0;
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(c10d, CUDA, library) {  // exchanged by whatever exchanges tensors of the CPU
  for (const char* name : {"send", "recv_", "broadcast_", "allreduce_", "allreduce_coalesced_", "reduce_", "allgather_",
                           "_allgather_base_", "allgather_into_tensor_coalesced_", "reduce_scatter_", "_reduce_scatter_base_",
                           "reduce_scatter_tensor_coalesced_", "gather_", "scatter_", "alltoall_", "alltoall_base_", "barrier"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage", set_whole);
  library.impl("set_.source_Storage_storage_offset", set_part);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("copy_", copy);
  library.impl("_copy_from", copy_from);
  library.impl("_local_scalar_dense", item);
  library.impl("record_stream", record_stream);
  library.impl("_fused_sdp_choice", choose_attention);
  for (const char* name : {"silu_backward", "mish_backward"})  // a kernel of a GPU, too, where others are given a formula
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY(pretended, library) {
  c10::SetAllocator(c10::kCUDA, &device_memory);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(choose_attention);  // whom attention asks in C++
  library.def("on_host(Tensor tensor) -> Tensor", on_host);
  library.def("on_device(Tensor made) -> Tensor", on_device);
  library.def("resize_storage(Tensor tensor, int size) -> ()", resize_storage);
  library.def("wait(str reason) -> ()", wait);
  library.def("departed() -> int", departed);
  library.def("arrive(int until) -> ()", arrive);
  library.def("begin_capture(int number) -> ()", begin_capture);
  library.def("end_capture() -> ()", end_capture);
  library.def("replay(int number) -> ()", replay);
  library.def("bytes_of_graph(int number) -> int", bytes_of_graph);
  library.def("forget_graph(int number) -> ()", forget_graph);
  library.def("bytes_in_use() -> int", [] { return in_use.load(); });
  library.def("peak_bytes() -> int", [] { return peak.load(); });
  library.def("reset_peak() -> ()", [] { peak = in_use.load(); });
  library.def("become_ghost() -> ()", [] { is_ghost = true; });
}
}  // namespace

extern "C" void watch_waits(int (*told)(const char*)) { watcher = told; }
