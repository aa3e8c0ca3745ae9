// Parameters of an operator's function that stand for several arguments of its schema. A group is declared
// once, beside the function that makes it:
//     template <>
//     struct GroupOf<Activation> : MadeBy<activation_of> {};
#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

namespace moe_mps {

template <class... T>
struct Types {
  static constexpr size_t count = sizeof...(T);
};

template <class... Lists>
struct Joined;
template <class... A>
struct Joined<Types<A...>> {
  using type = Types<A...>;
};
template <class... A, class... B, class... Rest>
struct Joined<Types<A...>, Types<B...>, Rest...> : Joined<Types<A..., B...>, Rest...> {};

// Arguments of the schema, and the value that `function` makes of them.
template <auto function>
struct MadeBy;
template <class Value, class... Arguments_, Value (*function)(Arguments_...)>
struct MadeBy<function> {
  using Arguments = Types<Arguments_...>;
  static Value make(Arguments_... arguments) { return function(arguments...); }
};

// Members of a struct, in their order.
template <class Value, class... Members>
Value aggregate(Members... members) {
  return {members...};
}

// Types that are groups have a specialisation.
template <class T, class = void>
struct GroupOf;

// A group that may be none: its tensors may be none, and it is none where the first of them is.
template <class T>
struct OrNone {
  using type = T;
  static T of(T argument) { return argument; }
};
template <>
struct OrNone<const at::Tensor&> {
  using type = const std::optional<at::Tensor>&;
  static const at::Tensor& of(type argument) { return *argument; }
};
template <class T, class Arguments = typename GroupOf<T>::Arguments>
struct MaybeMade;
template <class T, class First, class... Rest>
struct MaybeMade<T, Types<First, Rest...>> {
  using Arguments = Types<typename OrNone<First>::type, typename OrNone<Rest>::type...>;
  static std::optional<T> make(typename OrNone<First>::type first, typename OrNone<Rest>::type... rest) {
    if (!first) return std::nullopt;
    return GroupOf<T>::make(OrNone<First>::of(first), OrNone<Rest>::of(rest)...);
  }
};
template <class T>
struct GroupOf<std::optional<T>, std::void_t<typename GroupOf<T>::Arguments>> : MaybeMade<T> {};

// A parameter of an operator's function, of a group or of what an argument may be itself.
template <class T, class = void>
struct Parameter {
  using Arguments = Types<T>;
  template <size_t first, class All>
  static T made(const All& all) {
    return std::get<first>(all);
  }
};
template <class T>
struct Parameter<T, std::void_t<typename GroupOf<std::decay_t<T>>::Arguments>> {
  using Group = GroupOf<std::decay_t<T>>;
  using Arguments = typename Group::Arguments;
  template <size_t first, class All>
  static auto made(const All& all) {
    return made<first>(all, std::make_index_sequence<Arguments::count>());
  }
  template <size_t first, class All, size_t... i>
  static auto made(const All& all, std::index_sequence<i...>) {
    return Group::make(std::get<first + i>(all)...);
  }
};

// The arguments of a function's parameters, and a call of it with them.
template <class... Parameters>
struct Gathered {
  using Arguments = typename Joined<Types<>, typename Parameter<Parameters>::Arguments...>::type;

  template <class Function, class All>
  static auto call(Function function, const All& all) {
    return call(function, all, std::index_sequence_for<Parameters...>());
  }

 private:
  // The place of each parameter's first argument.
  static constexpr auto places() {
    std::array<size_t, sizeof...(Parameters) + 1> places{};
    size_t i = 0;
    ((places[i + 1] = places[i] + Parameter<Parameters>::Arguments::count, ++i), ...);
    return places;
  }
  template <class Function, class All, size_t... i>
  static auto call(Function function, const All& all, std::index_sequence<i...>) {
    return function(Parameter<Parameters>::template made<places()[i]>(all)...);
  }
};

}  // namespace moe_mps
