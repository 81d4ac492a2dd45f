#include "daemon/app/log_fields.h"

namespace moecached {
namespace {

bool is_key_start(char c) { return c >= 'a' && c <= 'z'; }
bool is_key_char(char c) { return is_key_start(c) || (c >= '0' && c <= '9') || c == '_'; }

// Length of "key" when `text` starts with "key=", else 0.
std::size_t key_length(std::string_view text) {
  if (text.empty() || !is_key_start(text[0])) return 0;
  std::size_t length = 1;
  while (length < text.size() && is_key_char(text[length])) ++length;
  return length < text.size() && text[length] == '=' ? length : 0;
}

}  // namespace

LogFields split_fields(std::string_view line) {
  LogFields out;
  std::size_t begin = 0;  // of the piece being read: the sentence, or a field's value
  std::string_view key;   // empty: the sentence
  const auto finish = [&](std::size_t end) {
    const std::string_view piece = line.substr(begin, end - begin);
    if (key.empty()) {
      out.sentence = piece;
    } else {
      out.fields.emplace_back(key, piece);
    }
  };
  for (std::size_t i = 0; i < line.size(); ++i) {
    const bool word_start = i == 0 || line[i - 1] == ' ';
    const std::size_t length = word_start ? key_length(line.substr(i)) : 0;
    if (length == 0) continue;
    finish(i == 0 ? 0 : i - 1);
    key = line.substr(i, length);
    begin = i + length + 1;
    i = begin - 1;
  }
  finish(line.size());
  return out;
}

}  // namespace moecached
