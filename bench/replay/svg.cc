#include "bench/replay/svg.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

namespace moecached::replay {
namespace {

constexpr double kLeft = 64, kTop = 48, kWidth = 560, kHeight = 340, kLegend = 190;

struct Curve {
  std::string name;
  bool is_yardstick = false;
  std::vector<std::pair<double, double>> points;  // share, hit rate; both 0..1
};

std::string format(const char* pattern, auto... values) {
  char text[512];
  std::snprintf(text, sizeof text, pattern, values...);
  return text;
}

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '&':
        out += "&amp;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
    }
  }
  return out;
}

std::vector<Curve> curves_of(const Report& report) {
  std::vector<Curve> curves;
  const auto curve = [&](const std::string& name, bool is_yardstick) -> Curve& {
    for (Curve& each : curves) {
      if (each.name == name) return each;
    }
    return curves.emplace_back(Curve{name, is_yardstick, {}});
  };
  const auto suffix = [](std::uint32_t n_lanes) {
    return n_lanes == 1 ? std::string() : ", " + std::to_string(n_lanes) + " processes";
  };
  for (const Run& run : report.runs) {
    if (run.private_pools) continue;
    const Tally total = run.result.total();
    curve(run.policy + suffix(run.n_lanes), false)
        .points.emplace_back(run.slots.share, share(total.hits, total.lookups));
  }
  for (const Yardstick& each : report.yardsticks) {
    if (each.private_pools) continue;
    curve("Belady" + suffix(each.n_lanes), true)
        .points.emplace_back(each.slots.share, share(each.belady.hits, each.belady.lookups));
    curve("Belady with bypass" + suffix(each.n_lanes), true)
        .points.emplace_back(each.slots.share, share(each.bypass.hits, each.bypass.lookups));
  }
  for (Curve& each : curves) std::sort(each.points.begin(), each.points.end());
  // The legend in the order of the lines, best first.
  std::stable_sort(curves.begin(), curves.end(), [](const Curve& a, const Curve& b) {
    const auto sum = [](const Curve& c) {
      double all = 0;
      for (const auto& point : c.points) all += point.second;
      return all / static_cast<double>(std::max<std::size_t>(1, c.points.size()));
    };
    return sum(a) > sum(b);
  });
  return curves;
}

double x_of(double value) { return kLeft + value * kWidth; }
double y_of(double value) { return kTop + (1 - value) * kHeight; }

}  // namespace

std::string to_svg(const Report& report) {
  const std::vector<Curve> curves = curves_of(report);
  const double height = std::max(kTop + kHeight + 56, kTop + 20.0 * static_cast<double>(curves.size()) + 24);
  std::string out = format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" font-family=\"system-ui, "
      "sans-serif\" font-size=\"13\">\n",
      kLeft + kWidth + kLegend, height);
  // Okabe and Ito's colours, told apart by most people; the shades differ so that both backgrounds carry
  // them.
  out +=
      "<style>\n"
      ".paper{fill:#fff}.ink{fill:#222}.axis{stroke:#222}.grid{stroke:#ddd}\n"
      ".line{fill:none;stroke-width:2;stroke-linejoin:round}\n"
      ".c0{stroke:#0072b2}.c1{stroke:#d55e00}.c2{stroke:#009e73}.c3{stroke:#cc79a7}.c4{stroke:#b58900}\n"
      ".c5{stroke:#56b4e9}.c6{stroke:#6c3fb5}.c7{stroke:#8c564b}.best{stroke:#777;stroke-dasharray:7 "
      "4}.best.bypass{stroke-dasharray:2 3}\n"
      "@media (prefers-color-scheme: dark){.paper{fill:#16181d}.ink{fill:#e6e6e6}.axis{stroke:#e6e6e6}\n"
      ".grid{stroke:#3a3d45}.c0{stroke:#4aa8e8}.c1{stroke:#ff8a4c}.c2{stroke:#2fd0a0}.c3{stroke:#e8a3c8}\n"
      ".c4{stroke:#e6c14a}.c6{stroke:#a98be8}.c7{stroke:#c49c94}.best{stroke:#aaa}}\n"
      "</style>\n<rect class=\"paper\" width=\"100%\" height=\"100%\"/>\n";
  out += "<title>" + escaped("Hit rate over slots: " + report.header.model) + "</title>\n";
  out += format("<text class=\"ink\" x=\"%.0f\" y=\"26\" font-size=\"15\">", kLeft) +
         escaped("Hit rate over slots: " + report.header.model +
                 (report.header.is_synthetic ? " (synthetic)" : "") +
                 (report.mode == Mode::kPool ? ", every miss loaded" : ", misses read in place")) +
         "</text>\n";
  for (int percent = 0; percent <= 100; percent += 20) {
    const double value = percent / 100.0;
    out += format("<path class=\"grid\" d=\"M%.1f %.1fH%.1f\"/>\n", kLeft, y_of(value), kLeft + kWidth);
    out += format("<path class=\"grid\" d=\"M%.1f %.1fV%.1f\"/>\n", x_of(value), kTop, kTop + kHeight);
    out += format("<text class=\"ink\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">%d %%</text>\n", kLeft - 8,
                  y_of(value) + 4, percent);
    out += format("<text class=\"ink\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%d %%</text>\n",
                  x_of(value), kTop + kHeight + 20, percent);
  }
  out += format("<path class=\"axis\" fill=\"none\" d=\"M%.1f %.1fV%.1fH%.1f\"/>\n", kLeft, kTop,
                kTop + kHeight, kLeft + kWidth);
  out += format(
      "<text class=\"ink\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">experts that have a slot"
      "</text>\n",
      kLeft + kWidth / 2, kTop + kHeight + 42);
  out += format(
      "<text class=\"ink\" transform=\"translate(18 %.1f) rotate(-90)\" text-anchor=\"middle\">"
      "lookups that hit</text>\n",
      kTop + kHeight / 2);
  std::size_t colour = 0;
  double legend_y = kTop + 8;
  for (const Curve& curve : curves) {
    std::string style = curve.name.starts_with("Belady with") ? "best bypass" : "best";
    std::string dash;
    if (!curve.is_yardstick) {
      style = "c" + std::to_string(colour % 8);
      if (colour >= 8) dash = " stroke-dasharray=\"2 3\"";
      ++colour;
    }
    std::string points;
    for (const auto& [slots, rate] : curve.points) points += format("%.1f,%.1f ", x_of(slots), y_of(rate));
    if (!points.empty()) points.pop_back();
    out += "<polyline class=\"line " + style + "\"" + dash + " points=\"" + points + "\"/>\n";
    out += format("<path class=\"line %s\"%s d=\"M%.1f %.1fh24\"/>\n", style.c_str(), dash.c_str(),
                  kLeft + kWidth + 16, legend_y);
    out += format("<text class=\"ink\" x=\"%.1f\" y=\"%.1f\">", kLeft + kWidth + 46, legend_y + 4) +
           escaped(curve.name) + "</text>\n";
    legend_y += 20;
  }
  return out + "</svg>\n";
}

}  // namespace moecached::replay
