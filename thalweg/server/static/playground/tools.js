// What the model may call and what shape its answer must have: the tools with their dialog, and the answer's format.

import { $, complain, make, makeButton, readObject, recall, remember } from "./page.js";

const NOTHING = { type: "object", properties: {} };
const EXAMPLES = {
  roll_dice: {
    name: "roll_dice",
    description: "Throw dice",
    parameters: {
      type: "object",
      properties: { dice: { type: "integer", description: "Number of dice" }, sides: { type: "integer", description: "Sides of each die" } },
      required: ["dice", "sides"],
    },
  },
};

export class ToolBox {
  #kept;            // the user's tools, as the API wants functions: name, description, parameters, strict
  #examples = [];   // those that examples brought into the conversation on the page; it keeps them
  #edited = null;   // the tool in the dialog; null is a new one
  #changed;

  constructor(changed) {
    this.#changed = changed;
    this.#kept = kept();
    $("add-tool").addEventListener("click", () => this.#open(null));
    $("tool-cancel").addEventListener("click", () => $("tool-dialog").close());
    $("tool-form").addEventListener("submit", (event) => { event.preventDefault(); this.#save(); });
    $("tool-parameters").addEventListener("input", () => { spread(); checkParameters(); });
    $("tool-name").addEventListener("input", () => this.#checkName());
    $("format").addEventListener("input", showSchema);
    $("schema").addEventListener("input", showSchema);
    for (const name of ["format", "schema"]) {
      const value = recall("localStorage", name);
      if (value !== null) $(name).value = value;
    }
    $("parallel").checked = recall("localStorage", "parallel") !== "false";
    showSchema();
    this.#show(recall("localStorage", "tool_choice"));
  }

  // The tools that a request offers. The user's own has precedence over an example with its name.
  get #tools() {
    const names = this.#kept.map((tool) => tool.name);
    return [...this.#kept, ...this.#examples.filter((tool) => !names.includes(tool.name))];
  }

  // The fields of a request; what is off is left out.
  fields() {
    const asked = {}, tools = this.#tools;
    if (tools.length) {
      asked.tools = tools.map((tool) => ({ type: "function", function: tool }));
      const choice = $("tool_choice").value;
      asked.tool_choice = choice.startsWith("call ") ? { type: "function", function: { name: choice.slice(5) } } : choice;
      if (!$("parallel").checked) asked.parallel_tool_calls = false;
    }
    const format = $("format").value;
    if (format === "json_object") asked.response_format = { type: format };
    const schema = readObject($("schema").value, "The schema");
    if (format === "json_schema" && schema.value) {
      asked.response_format = { type: format, json_schema: { name: "answer", strict: true, schema: schema.value } };
    }
    return asked;
  }

  remember() {
    for (const name of ["format", "schema", "tool_choice"]) remember("localStorage", name, $(name).value);
    remember("localStorage", "parallel", $("parallel").checked);
    remember("localStorage", "tools", JSON.stringify(this.#kept));
  }

  // Offers the examples of a conversation in place of another's. examples: changed here when the user changes one.
  enter(examples) {
    if (examples === this.#examples) return;
    this.#examples = examples;
    this.#show($("tool_choice").value);
  }

  // Adds one of the examples to the conversation, unless a tool has its name.
  addExample(name) {
    if (this.#tools.some((tool) => tool.name === name)) return;
    this.#examples.push(EXAMPLES[name]);
    this.#update();
  }

  #remove(tool) {
    for (const list of [this.#kept, this.#examples]) if (list.includes(tool)) list.splice(list.indexOf(tool), 1);
  }

  #update(choice = $("tool_choice").value) {
    this.#show(choice);
    this.remember();
    this.#changed();
  }

  #show(choice) {
    const tools = this.#tools;
    $("tool-list").replaceChildren(...tools.map((tool) => {
      const item = make("li");
      const edit = makeButton(tool.name, "tool", () => this.#open(tool));
      edit.setAttribute("aria-label", `Edit ${tool.name}`);
      if (this.#examples.includes(tool)) edit.append(make("small", "", "this conversation"));
      const remove = makeButton("×", "remove", () => { this.#remove(tool); this.#update(); $("add-tool").focus(); });
      remove.setAttribute("aria-label", `Remove ${tool.name}`);
      item.append(edit, remove);
      return item;
    }));
    $("tool-options").hidden = !tools.length;
    const options = [["auto", "when needed"], ["required", "at least one"], ["none", "never"]];
    options.push(...tools.map((tool) => ["call " + tool.name, `only ${tool.name}`]));
    $("tool_choice").replaceChildren(...options.map(([value, text]) => {
      const option = make("option", "", text);
      option.value = value;
      return option;
    }));
    $("tool_choice").value = options.some(([value]) => value === choice) ? choice : "auto";
  }

  #open(edited) {
    const tool = edited || { name: "", description: "", parameters: NOTHING };
    this.#edited = edited;
    $("tool-title").textContent = edited ? `The tool ${tool.name}` : "A new tool";
    $("tool-name").value = tool.name;
    $("tool-description").value = tool.description;
    $("tool-parameters").value = JSON.stringify(tool.parameters, null, 2);
    $("tool-strict").checked = tool.strict === true;
    complain($("tool-name"), "");
    checkParameters();
    $("tool-dialog").showModal();
    $("tool-name").focus();
  }

  #checkName() {
    const name = $("tool-name").value;
    const taken = this.#tools.some((tool) => tool.name === name && tool !== this.#edited);
    const plain = /^[A-Za-z0-9_-]{1,64}$/.test(name);
    complain($("tool-name"), taken ? `There is a tool ${name} already.` : plain ? "" : "1 to 64 letters, digits, _ and -");
  }

  #save() {
    this.#checkName();
    checkParameters();
    if (!$("tool-form").reportValidity()) return;
    const tool = { name: $("tool-name").value, description: $("tool-description").value.trim(), parameters: JSON.parse($("tool-parameters").value) };
    if ($("tool-strict").checked) tool.strict = true;
    if (this.#kept.includes(this.#edited)) this.#kept[this.#kept.indexOf(this.#edited)] = tool;
    else {
      this.#remove(this.#edited);  // an example that the user changed is the user's
      this.#kept.push(tool);
    }
    $("tool-dialog").close();
    this.#update();
  }
}

function kept() {
  try {
    const tools = JSON.parse(recall("localStorage", "tools"));
    return Array.isArray(tools) ? tools.filter((tool) => tool && typeof tool.name === "string" && tool.parameters) : [];
  } catch {
    return [];
  }
}

function showSchema() {
  const on = $("format").value === "json_schema";
  $("schema-field").hidden = !on;
  complain($("schema"), on ? readObject($("schema").value, "The schema").problem || "" : "");
}

function checkParameters() {
  const { value, problem } = readObject($("tool-parameters").value, "The schema");
  const wrong = value && value.type !== "object" ? 'The schema of the arguments must have "type": "object"' : "";
  complain($("tool-parameters"), problem || wrong);
}

// A whole tool that was pasted as JSON, in the API's form or bare, fills the form.
function spread() {
  const { value } = readObject($("tool-parameters").value, "");
  const tool = value && (value.type === "function" && value.function ? value.function : value);
  if (!tool || typeof tool.name !== "string" || typeof tool.parameters !== "object") return;
  $("tool-name").value = tool.name;
  $("tool-description").value = tool.description || "";
  $("tool-parameters").value = JSON.stringify(tool.parameters, null, 2);
  $("tool-strict").checked = tool.strict === true;
}
