// Texts of the page, [English, Chinese], and the functions that show texts and numbers.

export const WORDS = {
  skip: ["Skip to the content", "跳到内容"],
  views: ["Views", "视图"],
  runs: ["Runs", "训练"],
  plan: ["Plan", "规划"],
  list: ["List of runs", "训练列表"],
  language: ["Language", "语言"],
  theme: ["Colours", "配色"],
  theme_auto: ["as the system", "跟随系统"],
  theme_light: ["light", "浅色"],
  theme_dark: ["dark", "深色"],
  filter: ["Filter by name or state", "按名称或状态筛选"],
  none: ["No runs here yet. A run that is started with --save_dir in this folder appears by itself.",
    "这里还没有训练。用 --save_dir 在此文件夹中启动的训练会自动出现。"],
  pick: ["Choose a run.", "请选择一个训练。"],
  connected: ["live", "实时"],
  lost: ["no connection to `mobius board`; trying again", "与 mobius board 的连接已断开，正在重试"],
  running: ["running", "运行中"],
  done: ["done", "已完成"],
  stopped: ["stopped, can be resumed", "已停止，可恢复"],
  failed: ["failed", "失败"],
  killed: ["killed: its process is gone", "已被终止：进程不存在"],
  empty: ["no step yet", "尚无步骤"],
  now: ["{0} is {1}", "{0}：{1}"],
  foreign: ["This run was written by another version or program; what can be read is shown.",
    "此训练由其他版本或程序写入，仅显示可读取的内容。"],
  unread: ["{0} lines of the run's feed could not be read.", "有 {0} 行记录无法读取。"],
  progress: ["step {0} of {1}", "第 {0} / {1} 步"],
  step_only: ["step {0}", "第 {0} 步"],
  left: ["about {0} left ({1} to {2})", "约剩 {0}（{1} 至 {2}）"],
  resumed: ["resumed after step {0}", "在第 {0} 步之后恢复"],
  loss: ["loss", "损失"],
  median_loss: ["loss, median of 20 steps", "损失（近 20 步中位数）"],
  short_loss: ["median loss", "损失中位数"],
  eval_loss: ["evaluation loss", "评估损失"],
  evaluation: ["evaluation", "评估"],
  rewards: ["rewards of answers", "回答的奖励"],
  "rewards/chosen": ["chosen", "优选回答"],
  "rewards/rejected": ["rejected", "劣选回答"],
  "rewards/margins": ["margin", "差值"],
  "rewards/accuracies": ["share of pairs in the right order", "排序正确的偏好对比例"],
  accuracy: ["share of pairs in the right order", "排序正确的偏好对比例"],
  margin: ["margin", "差值"],
  mean_reward: ["mean reward", "平均奖励"],
  kl: ["KL of mismatched answers", "错配回答的 KL"],
  logps: ["log-probabilities of answers", "回答的对数概率"],
  "logps/chosen": ["chosen", "优选回答"],
  "logps/rejected": ["rejected", "劣选回答"],
  divergence: ["divergence from the teacher", "与教师的散度"],
  cross_entropy: ["cross entropy of the targets", "目标的交叉熵"],
  nll_loss: ["cross entropy of chosen answers", "优选回答的交叉熵"],
  odds_loss: ["loss of the odds ratio", "胜算比损失"],
  grad_norm: ["gradient norm", "梯度范数"],
  learning_rate: ["learning rate", "学习率"],
  tokens_per_second: ["tokens per second", "每秒 token 数"],
  step_seconds: ["seconds per step", "每步秒数"],
  gpu: ["GPU memory, fullest GPU, GiB", "显存（最满的 GPU），GiB"],
  host: ["host memory, all ranks, GiB", "主机内存（所有进程），GiB"],
  gpu_owners: ["GPU memory by owner", "显存按用途"],
  host_owners: ["Host memory by owner", "主机内存按用途"],
  waits: ["seconds of waiting per step", "每步等待秒数"],
  planned: ["planned", "计划"],
  predicted: ["predicted", "预测"],
  measured: ["measured", "实测"],
  smoothed: ["smoothed", "平滑"],
  compare: ["Compare with", "对比"],
  nothing: ["nothing", "无"],
  axis: ["Horizontal axis", "横轴"],
  axis_step: ["step", "步"],
  axis_time: ["hours", "小时"],
  smoothing: ["Smoothing", "平滑"],
  logarithmic: ["Logarithmic loss", "对数损失"],
  whole: ["Whole run", "完整显示"],
  numbers: ["Numbers", "数值"],
  chart: ["{0}: {1} at {2}, from {3} to {4}. Arrow keys move along the chart.",
    "{0}：{2} 处为 {1}，范围 {3} 至 {4}。方向键移动光标。"],
  where: ["Where a step's time goes", "一步的时间去向"],
  where_text: ["Medians over the last steps, for the rank that waits longest.", "最近各步的中位数，取等待最久的进程。"],
  compute: ["compute", "计算"],
  wait: ["waiting for {0}", "等待{0}"],
  weights: ["weights", "权重"],
  optimizer: ["optimizer", "优化器"],
  neighbours: ["neighbours", "相邻进程"],
  activations: ["activations", "激活"],
  timeline: ["Timeline of a measured step", "实测单步时间线"],
  timeline_predicted: ["Predicted timeline of a step", "预测的单步时间线"],
  no_timeline: ["Start a run with --trace to see when each rank computed, loaded and waited.",
    "用 --trace 启动训练，可查看各进程何时计算、加载与等待。"],
  rank: ["rank {0}", "进程 {0}"],
  step: ["Step", "步"],
  per_rank: ["Seconds of each rank by lane", "各进程各通道秒数"],
  against: ["Planned and measured", "计划与实测"],
  difference: ["difference", "差异"],
  limited: ["limited by", "瓶颈"],
  answers: ["Generated answers", "生成的回答"],
  prompt: ["prompt", "提示"],
  answer: ["answer", "回答"],
  label: ["label", "标签"],
  evaluations: ["Evaluations", "评估"],
  samples: ["samples", "样本"],
  perplexity: ["perplexity", "困惑度"],
  token_accuracy: ["token accuracy", "token 准确率"],
  warnings: ["Warnings", "警告"],
  checkpoints: ["Checkpoints", "检查点"],
  path: ["path", "路径"],
  bytes: ["size", "大小"],
  seconds: ["seconds", "秒"],
  options: ["Options", "选项"],
  plan_file: ["Plan", "计划"],
  plan_model: ["Model: size, hub id or folder", "模型：规模、Hub 名称或文件夹"],
  plan_config: ["or its config.json (drop it here)", "或其 config.json（可拖放）"],
  plan_card: ["GPU", "显卡"],
  plan_here: ["this machine's", "本机"],
  plan_count: ["Number of GPUs", "显卡数量"],
  plan_memory: ["Host memory, GiB", "主机内存，GiB"],
  plan_disks: ["Folders on disks for optimizer states", "存放优化器状态的磁盘文件夹"],
  plan_disk_rate: ["GB/s that disks read, write", "磁盘读、写 GB/s"],
  plan_sequence: ["Tokens per row", "每行 token 数"],
  plan_rows: ["Rows per step", "每步行数"],
  plan_chunks: ["Microbatches", "微批次数"],
  plan_method: ["Training", "训练方式"],
  plan_states: ["Optimizer states", "优化器状态"],
  plan_products: ["Matrix products", "矩阵乘法格式"],
  plan_stages: ["Pipeline stages", "流水线阶段数"],
  plan_rest: ["More fields", "更多设置"],
  plan_more: ["More options", "更多选项"],
  plan_tokens: ["Tokens of your data", "数据的 token 数"],
  plan_price: ["Price of the machine per hour", "机器每小时价格"],
  starting: ["The planner starts ...", "规划器正在启动……"],
  planning: ["Planning ...", "正在规划……"],
  fits: ["It fits.", "可以运行。"],
  fits_not: ["It does not fit.", "无法运行。"],
  refused: ["This cannot be planned.", "无法规划。"],
  draft: ["A draft after {0} s; the search for the best plan goes on.", "{0} 秒得出的草案，正在寻找最佳方案。"],
  final: ["{0} s", "{0} 秒"],
  searching: ["Looking for single changes with which it fits ...", "正在寻找可行的单项修改……"],
  remedies: ["Each of these alone fits", "以下任一修改即可运行"],
  mfu: ["model FLOP utilization", "算力利用率 MFU"],
  epoch: ["an epoch of your data", "一轮数据"],
  cost: ["cost of an epoch", "一轮费用"],
  on_disks: ["On disks: {0}; each step writes {1}.", "磁盘：{0}；每步写入 {1}。"],
  bubble: ["bubble", "流水线气泡"],
  command: ["Command", "命令"],
  copy: ["Copy", "复制"],
  copied: ["Copied", "已复制"],
  faster: ["What would make it faster", "如何更快"],
  gain: ["{0} limits the step: {1} % shorter if it were 1.1 times as fast.", "瓶颈是 {0}：若其快 1.1 倍，每步缩短 {1} %。"],
  try_changes: ["Try single changes", "尝试单项修改"],
  more_tokens: ["{0} % more tokens per second: {1}", "每秒 token 数增加 {0} %：{1}"],
  tried: ["{0} changes were tried; all others gain less than 1 %.", "已尝试 {0} 项修改，其余提升不足 1 %。"],
  details: ["Everything that the planner says", "规划器的全部说明"],
  ask_planner: ["Ask the planner", "询问规划器"],
  no_prediction: ["There is no prediction for this run.", "此训练没有预测。"],
  model: ["parameters", "参数量"],
  device: ["device", "设备"],
  epochs: ["epochs", "轮数"],
  batch: ["rows × tokens per step", "每步 行 × token"],
  stages: ["stages", "流水线阶段"],
  startup: ["seconds of start-up", "启动秒数"],
  imports: ["imports", "导入"],
  planning_part: ["planning", "规划"],
  data: ["data", "数据"],
  layers: ["layers", "层"],
  place: ["place", "位置"],
  resident: ["resident", "常驻"],
  streamed: ["streamed", "流式"],
  full: ["full", "全参数"],
  lora: ["LoRA", "LoRA"],
  advice: ["What the planner advises", "规划器的建议"],
  planner_words: ["The planner's own words", "规划器原文（英文）"],
  fill_in: ["Replace these words by your values:", "请替换："],
  blank_MODEL: ["MODEL, the model's folder or hub id;", "MODEL：模型文件夹或 Hub 名称；"],
  blank_FOLDER: ["FOLDER, a folder on a disk;", "FOLDER：磁盘上的文件夹；"],
  blank_DATASET: ["DATASET, a file or a name of your data.", "DATASET：数据文件或名称。"],
  comma: [", ", "，"],
  lane_compute: ["compute", "计算"],
  lane_wait: ["waits", "等待"],
  lane_load: ["loads", "加载"],
  lane_offload: ["offloads", "卸载"],
  lane_offload_activations: ["activations out", "卸载激活"],
  lane_prefetch_activations: ["activations in", "预取激活"],
  lane_send: ["sends", "发送"],
  lane_receive: ["receives", "接收"],
  lane_optimizer: ["optimizer", "优化器"],
  lane_reduce: ["reduces", "归约"],
  lane_gather: ["gathers", "聚集"],
  // Names from the planner: owners of memory, parts of the machine, and endings of a remedy's texts.
  gradients: ["gradients", "梯度"],
  inputs: ["inputs", "层输入"],
  "working set": ["working set", "工作区"],
  "saved activations": ["saved activations", "保存的激活"],
  messages: ["messages", "消息"],
  "kv cache": ["keys and values", "键值缓存"],
  "quantized copies": ["quantized copies", "量化副本"],
  libraries: ["libraries", "库"],
  "streamed stages": ["streamed stages", "流式阶段"],
  "resident stages": ["resident stages", "常驻阶段"],
  "stages that are updated": ["stages that are updated", "更新中的阶段"],
  processes: ["processes", "进程"],
  PCIe: ["PCIe", "PCIe 总线"],
  "host memory": ["host memory", "主机内存"],
  "CPU cores": ["CPU cores", "CPU 核心"],
  "the link between replicas": ["the link between replicas", "副本间链路"],
  disks: ["disks", "磁盘"],
  "of host memory": ["{0} of host memory", "主机内存 {0}"],
  "on disks": ["{0} on disks", "磁盘 {0}"],
  "per GPU": ["{0} per GPU", "每张显卡 {0}"],
  "tokens/s": ["about {0} tokens/s", "约每秒 {0} token"],
  "tokens/s if disks were no limit": ["about {0} tokens/s if disks were no limit", "若磁盘不成瓶颈，约每秒 {0} token"],
  "on a host that has as much": ["on a host that has as much", "需有同样大内存的主机"],
};

// Patterns of the planner's refusals, and the same refusals in Chinese.
export const REFUSALS = [
  [/needs ([\d.]+ \w+) of GPU memory.*, ([\d.]+ \w+) is available/, "显存不足：需要 {0}，可用 {1}。"],
  [/need ([\d.]+ \w+) of host memory.*, ([\d.]+ \w+) is available/, "主机内存不足：需要 {0}，可用 {1}。"],
  [/: ([\d.]+ \w+) of optimizer states would be on its file system, ([\d.]+ \w+) is free/, "磁盘空间不足：需要 {0}，剩余 {1}。"],
  [/the run would write ([\d.,]+ \w+) .*, ([\d.,]+ \w+) may be written/, "磁盘写入过多：将写入 {0}，允许 {1}。"],
  [/`--num_stages` (\d+): not a multiple of the number of ranks, (\d+)/, "流水线阶段数 {0} 不是显卡数 {1} 的整数倍。"],
  [/`--batch_size` (\d+) and `--num_chunks` (\d+): \d+ has no/, "每步 {0} 行不能等分为 {1} 个微批次。"],
  [/`--(\w+)` is ('?[^;]*); it must be (.*)/, "--{0} 的值 {1} 不允许；应为：{2}"],
  [/unknown option `--([^`]*)`/, "没有选项 --{0}。"],
  [/did you mean `--(\w+)`/, "是否指 --{0}？"],
  [/the card (\S+) has no (\S+) products/, "显卡 {0} 不支持 {1} 矩阵乘法。"],
  [/the planner's process has ended with code (\S+)\./, "规划器进程已退出（代码 {0}），下次修改时会重新启动。"],
];

let language = "en";

export function setLanguage(chosen) {
  language = chosen === "zh" ? "zh" : "en";
  document.documentElement.lang = language;
  for (const element of document.querySelectorAll("[data-t]")) element.textContent = t(element.dataset.t);
  for (const element of document.querySelectorAll("[data-t-label]")) element.setAttribute("aria-label", t(element.dataset.tLabel));
}

const filled = (text, values) => text.replace(/\{(\d)\}/g, (_, index) => values[index]);

export function t(key, ...values) {
  return filled(Object.hasOwn(WORDS, key) ? WORDS[key][language === "zh" ? 1 : 0] : String(key), values);
}

// A refusal in Chinese; empty if the page is in English.
export function refusals(text) {
  if (language !== "zh") return [];
  const found = REFUSALS.map(([pattern, chinese]) => [text.match(pattern), chinese]).filter(([match]) => match);
  return found.length ? found.map(([[, ...values], chinese]) => filled(chinese, values)) : [t("refused")];
}

// Memory and speed with a change, which the planner gives in parts such as "21.7 GiB per GPU".
export function remedyText(text) {
  return text.split(", ").map((part) => {
    const [, size, what] = part.match(/^(?:about )?([\d.,]+(?: \w?i?B)?) (.+)$/) ?? [];
    return what ? t(what, size) : t(part);
  }).join(t("comma"));
}

// An element with attributes (functions are listeners) and children; text is never read as HTML.
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function table(caption, head, rows) {
  return h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {}, h("caption", { class: "unseen" }, caption),
      h("thead", {}, h("tr", {}, head.map((cell) => h("th", { scope: "col" }, cell)))),
      h("tbody", {}, rows.map(([first, ...cells]) =>
        h("tr", {}, h("th", { scope: "row" }, first), cells.map((cell) => h("td", {}, cell)))))));
}

export function figures(value, digits = 4) {
  if (typeof value !== "number" || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

export function bytes(value) {
  if (!Number.isFinite(value)) return "–";
  const [unit, size] = value >= 2 ** 30 ? ["GiB", 2 ** 30] : value >= 2 ** 20 ? ["MiB", 2 ** 20] : ["KiB", 2 ** 10];
  return `${(value / size).toFixed(1)} ${unit}`;
}

export function duration(seconds) {
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  if (hours >= 100) return `${Math.floor(hours / 24)}d${String(hours % 24).padStart(2, "0")}h`;
  if (hours) return `${hours}h${String(minutes % 60).padStart(2, "0")}m`;
  return minutes ? `${minutes}m${String(Math.round(seconds % 60)).padStart(2, "0")}s` : `${Math.round(seconds)}s`;
}
