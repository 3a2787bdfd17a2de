// A CUDA device made of host memory, for a torch without CUDA: kernels are those of the CPU, streams, events and memory are
// clocks (late.hpp) that tell, at once and in every run, who has not waited for what he reads, writes or frees.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <unordered_set>

#include "late.hpp"

namespace late {

void define_communicator(py::module_& module);

namespace {

using at::Tensor;
using c10::IValue;

// Memory

struct Allocator : c10::Allocator {
  explicit Allocator(bool pinned) : pinned_(pinned) {}
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device = pinned_ ? c10::Device(c10::kCPU) : c10::Device(c10::kCUDA, 0);
    if (!bytes) return {nullptr, device};
    void* data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    TORCH_CHECK(data, "out of memory");
    std::memset(data, 0xff, bytes);  // not a number in any type: whoever reads what nobody wrote shall see it
    Tracker::get().allocated(data, bytes, pinned_ ? kHost : line_of(current));
    return {data, data, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static void release(void* data) {
    Tracker::get().freed(data);
    std::free(data);
  }
  bool pinned_;
};

Allocator& memory(bool pinned) {
  static auto* on_device = new Allocator(false);
  static auto* on_host = new Allocator(true);
  return pinned ? *on_host : *on_device;
}

struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isAvailable() const override { return true; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &memory(true); }
  bool isPinnedPtr(const void* data) const override { return Tracker::get().pinned(data); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);

// Streams and events

struct Event {
  Clock clock;
  size_t line;
  bool asked = false;
};

struct Guard : c10::impl::DeviceGuardImplInterface {
  static c10::Device device() { return {c10::kCUDA, 0}; }
  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(Tracker::get().make_stream()); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(Tracker::get().make_stream()); }
  c10::Stream exchangeStream(c10::Stream next) const override { return stream(std::exchange(current, next.id())); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& on, c10::DeviceIndex, c10::EventFlag) const override {
    delete static_cast<Event*>(*event);
    Tracker::get().begin(line_of(on.id()));  // what the host has done is behind it
    *event = new Event{Tracker::get().now(line_of(on.id())), line_of(on.id())};
  }
  void block(void* event, const c10::Stream& on) const override {
    if (event) Tracker::get().wait(line_of(on.id()), static_cast<Event*>(event)->clock);
  }
  // Unless the host has waited, it is never there when it is first asked for.
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto& found = *static_cast<Event*>(event);
    if (Tracker::get().host_knows(found.line, found.clock.at(found.line))) return true;
    if (!std::exchange(found.asked, true)) return false;
    Tracker::get().wait(kHost, found.clock);
    return true;
  }
  bool queryStream(const c10::Stream&) const override { return false; }
  void synchronizeStream(const c10::Stream& on) const override { Tracker::get().host_waits(line_of(on.id()), "stream.synchronize"); }
  void synchronizeEvent(void* event) const override {
    if (event) Tracker::get().host_waits_for(static_cast<Event*>(event)->clock, "event.synchronize");
  }
  void synchronizeDevice(c10::DeviceIndex) const override { Tracker::get().host_waits_for_all("synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& on) const override {
    Tracker::get().record(data.get(), line_of(on.id()));
  }
  double elapsedTime(void* begin, void* end, c10::DeviceIndex) const override {
    for (void* event : {begin, end}) {
      const auto& found = *static_cast<Event*>(event);
      TORCH_CHECK(Tracker::get().host_knows(found.line, found.clock.at(found.line)), "both events must be completed, and the host has not waited");
    }
    return 1.0;
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// Operations: done by the CPU at once, on the same memory.

size_t bytes_of(const Tensor& tensor) {
  if (!tensor.numel()) return 0;
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return (last + 1) * tensor.itemsize();
}

void touch(const Tensor& tensor, uint64_t time, bool writes, const char* what) {
  if (tensor.defined() && tensor.numel())
    Tracker::get().touch(line_of(current), time, tensor.const_data_ptr(), bytes_of(tensor), writes, what);
}

// Of a vector some elements of which are copied, what lies between the first and the last of them.
void touch_some(const Tensor& tensor, const Tensor& index, uint64_t time, bool writes, const char* what) {
  if (!tensor.numel() || !index.numel()) return;
  const int64_t* places = index.const_data_ptr<int64_t>();
  auto [low, high] = std::minmax_element(places, places + index.numel());
  auto* data = static_cast<const char*>(tensor.const_data_ptr()) + *low * tensor.itemsize();
  Tracker::get().touch(line_of(current), time, data, (*high - *low + 1) * tensor.itemsize(), writes, what);
}

Tensor with(c10::Storage storage, c10::DispatchKey key, const Tensor& like) {
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* implementation = made.unsafeGetTensorImpl();
  implementation->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) implementation->set_wrapped_number(true);
  return made;
}

Tensor near(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  const c10::Storage& whole = tensor.storage();
  c10::DataPtr data(const_cast<void*>(whole.data()), c10::Device(c10::kCPU));
  return with(c10::Storage(c10::Storage::use_byte_size_t(), whole.nbytes(), std::move(data), c10::GetCPUAllocator(), true),
              c10::DispatchKey::CPU, tensor);
}

Tensor far(const Tensor& tensor) {
  size_t bytes = tensor.storage().nbytes();
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, memory(false).allocate(bytes), &memory(false), true);
  if (bytes) std::memcpy(storage.mutable_data(), tensor.storage().data(), bytes);
  return with(std::move(storage), c10::DispatchKey::CUDA, tensor);
}

const Tensor& resize_(const Tensor& self, at::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* implementation = self.unsafeGetTensorImpl();
  if (self.sym_sizes() == size) return self;
  implementation->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t bytes = (self.numel() + self.storage_offset()) * self.itemsize();
  c10::Storage storage = self.storage();
  if (storage.nbytes() < bytes) {
    c10::DataPtr data = memory(false).allocate(bytes);
    if (storage.nbytes()) std::memcpy(data.mutable_get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
  return self;
}

struct Alias {
  Tensor far, near;
  bool writes;
};

// These give sizes that only the device knows.
const std::unordered_set<std::string> kAsks{
    "aten::nonzero",        "aten::masked_select", "aten::_unique2",     "aten::unique_dim", "aten::unique_consecutive",
    "aten::equal",          "aten::is_nonzero",    "aten::allclose",     "aten::bincount",   "aten::unique_dim_consecutive",
    "aten::repeat_interleave"};

void operation(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  const auto& schema = handle.schema();
  const char* name = schema.name().c_str();
  size_t count = schema.arguments().size();
  std::vector<Alias> aliases;
  auto replaced = [&](const Tensor& tensor, bool writes) {
    Tensor alias = near(tensor);
    if (tensor.defined() && tensor.is_cuda()) aliases.push_back({tensor, alias, writes});
    return alias;
  };
  for (size_t i = 0; i < count; ++i) {
    IValue& value = (*stack)[stack->size() - count + i];
    const auto* info = schema.arguments()[i].alias_info();
    bool writes = info && info->isWrite();
    if (value.isTensor()) {
      value = replaced(value.toTensor(), writes);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(replaced(tensor, writes));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional<Tensor>(replaced(*tensor, writes)) : std::nullopt);
      value = list;
    } else if (value.isDevice()) {
      value = c10::Device(c10::kCPU);
    } else if (value.isList()) {
      c10::List<IValue> list = value.toList();
      TORCH_CHECK(list.empty() || !list.get(0).isTensor(), name, " is unknown to the tests' device");
    }
  }
  // With the size of its result, or repeats that are a number, it need not ask.
  bool told = schema.name() == "aten::repeat_interleave" && !stack->back().isNone();
  auto& tracker = Tracker::get();
  uint64_t time = tracker.begin(line_of(current));
  bool views = false;
  for (const auto& each : schema.returns()) views = views || (each.alias_info() && !each.alias_info()->isWrite());
  // index_copy(self, dim, index, source, out), index_select(self, dim, index[, out]): of a vector, some elements.
  bool into = schema.name() == "aten::index_copy" && aliases.size() == 4 && aliases[0].far.is_same(aliases[3].far);
  bool some = (into || (schema.name() == "aten::index_select" && aliases.size() > 1)) && aliases[0].far.dim() == 1 && aliases[0].far.is_contiguous();
  for (size_t i = 0; i < aliases.size() && !views; ++i)
    if (some && i % 3 == 0) touch_some(aliases[i].far, aliases[1].near, time, aliases[i].writes, name);
    else touch(aliases[i].far, time, aliases[i].writes, name);
  {
    at::AutoDispatchBelowADInplaceOrView below;
    handle.callBoxed(stack);
  }
  auto origin = [&](const Tensor& tensor) -> const Alias* {
    for (const Alias& alias : aliases)
      if (tensor.unsafeGetTensorImpl() == alias.near.unsafeGetTensorImpl()) return &alias;
    for (const Alias& alias : aliases)
      if (tensor.storage().data() && tensor.storage().data() == alias.far.storage().data()) return &alias;
    return nullptr;
  };
  auto result = [&](const Tensor& tensor) -> Tensor {
    if (!tensor.defined() || tensor.is_cuda()) return tensor;
    const Alias* alias = origin(tensor);
    if (!alias) {
      Tensor made = far(tensor);
      touch(made, time, true, name);
      return made;
    }
    if (tensor.unsafeGetTensorImpl() == alias->near.unsafeGetTensorImpl()) return alias->far;
    return with(alias->far.storage(), c10::DispatchKey::CUDA, tensor);
  };
  for (const Alias& alias : aliases)
    if (alias.writes && (alias.near.sizes() != alias.far.sizes() || alias.near.strides() != alias.far.strides())) {
      resize_(alias.far, c10::fromIntArrayRefSlow(alias.near.sizes()), std::nullopt);
      alias.far.unsafeGetTensorImpl()->set_sizes_and_strides(alias.near.sizes(), alias.near.strides());
      if (alias.near.numel() && alias.near.const_data_ptr() != alias.far.const_data_ptr())
        std::memcpy(alias.far.mutable_data_ptr(), alias.near.const_data_ptr(), bytes_of(alias.near));
    }
  size_t returned = schema.returns().size();
  for (size_t i = 0; i < returned; ++i) {
    IValue& value = (*stack)[stack->size() - returned + i];
    if (value.isTensor()) {
      value = result(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(result(tensor));
      value = list;
    }
  }
  if (kAsks.count(schema.name())) {
    if (!told) tracker.host_waits(line_of(current), name);
  }
}

Tensor empty(at::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory(false), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::SymIntArrayRef size, at::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory(false),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

// Between host and device: the host waits, unless it is told not to and the host's memory is pinned.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  auto& tracker = Tracker::get();
  Tensor to = near(self), from = near(source);
  uint64_t time = tracker.begin(line_of(current));
  touch(source, time, false, "aten::copy_");
  touch(self, time, true, "aten::copy_");
  {
    at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
  }
  if (self.is_cuda() != source.is_cuda() && self.numel()) {
    const Tensor& host = self.is_cuda() ? source : self;
    bool pinned = tracker.pinned(host.const_data_ptr());
    if (!self.is_cuda() && (!non_blocking || !pinned)) tracker.host_waits(line_of(current), "copy to the host");
    else if (!non_blocking && pinned) tracker.host_waits(line_of(current), "copy from the host");
    else if (!pinned) tracker.stalls("copy of pageable memory");
  }
  return self;
}

at::Scalar local_scalar(const Tensor& self) {
  uint64_t time = Tracker::get().begin(line_of(current));
  touch(self, time, false, "item");
  Tracker::get().host_waits(line_of(current), "item");
  return near(self).item();
}

void record_stream(Tensor& self, c10::Stream stream) { Tracker::get().record(self.storage().data(), line_of(stream.id())); }

Tensor& set_storage(Tensor& self, c10::Storage source, c10::SymInt offset, at::SymIntArrayRef size, at::SymIntArrayRef stride) {
  auto* implementation = self.unsafeGetTensorImpl();
  implementation->set_storage_keep_dtype(std::move(source));
  std::vector<int64_t> strides = C10_AS_INTARRAYREF_SLOW(stride).vec();
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (strides.empty() && !sizes.empty()) {
    strides.assign(sizes.size(), 1);
    for (size_t dim = sizes.size() - 1; dim > 0; --dim) strides[dim - 1] = strides[dim] * sizes[dim];
  }
  implementation->set_sizes_and_strides(sizes, strides, offset.guard_int(__FILE__, __LINE__));
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage source) {
  int64_t elements = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {c10::SymInt(elements)}, {});
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&operation>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy_);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("record_stream", &record_stream);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
}

}  // namespace
}  // namespace late

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace late;
  c10::SetAllocator(c10::kCUDA, &memory(false));
  module.def("current_stream", [] { return current; });
  module.def("set_stream", [](int64_t id) { return std::exchange(current, id); });
  module.def("synchronize", [] { Tracker::get().host_waits_for_all("synchronize"); });
  module.def("waits", [] { return Tracker::get().waits(); });
  module.def("forbid", [](bool forbidden) { Tracker::get().forbid(forbidden); });
  module.def("races", [] { return Tracker::get().races(); });
  // The host reads or writes a tensor that may be in pinned memory.
  module.def("host", [](const at::Tensor& tensor, bool writes, const std::string& what) {
    static auto* names = new std::set<std::string>();
    auto& tracker = Tracker::get();
    if (!tensor.numel() || !tracker.pinned(tensor.const_data_ptr())) return;
    tracker.touch(kHost, tracker.begin(kHost), tensor.const_data_ptr(), bytes_of(tensor), writes, names->insert(what).first->c_str());
  });
  define_communicator(module);
}
