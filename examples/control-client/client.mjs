// Asks a swarmnode daemon by gRPC, from the proto files alone:
//
//   node client.mjs unix:HOME/grpc.sock status
//   node client.mjs 127.0.0.1:9470 watch 3 --token HOME/control.token      (join ... --control-listen 9470)
//   node client.mjs ADDRESS health | pause SECONDS | resume
//
// Prints one line of JSON for each answer. Exit code 1 with one line on stderr if the daemon says no.

import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import { protoPath as healthProto } from "grpc-health-check";

const PROTO = process.env.SWARMNODE_PROTO ?? fileURLToPath(new URL("../../proto", import.meta.url));
const DEADLINE_MS = 10_000;

const words = process.argv.slice(2);
const flag = words.indexOf("--token");
const [, tokenFile] = flag < 0 ? [] : words.splice(flag, 2);
const [address, verb = "status", value] = words;

const metadata = new grpc.Metadata();
if (tokenFile) metadata.set("authorization", `Bearer ${readFileSync(tokenFile, "utf8").trim()}`);

const options = { keepCase: true, enums: String, longs: Number, defaults: true };
const load = (file, includeDirs) => grpc.loadPackageDefinition(loadSync(file, { ...options, includeDirs }));
const { Control } = load("swarmnode/v1/control.proto", [PROTO]).swarmnode.v1;
const { Health } = load(healthProto, []).grpc.health.v1;
const plain = grpc.credentials.createInsecure();
const control = new Control(address, plain);

const show = (answer) => console.log(JSON.stringify(answer));

function fail(error) {
  console.error(`${grpc.status[error.code] ?? error.code}: ${error.details ?? error.message}`);
  process.exitCode = 1;
}

function ask(client, method, request = {}) {
  const deadline = Date.now() + DEADLINE_MS;
  client[method](request, metadata, { deadline }, (error, answer) => error ? fail(error) : show(answer));
}

function watch(times) {
  const statuses = control.Watch({ every_s: 0.5 }, metadata);
  statuses.on("data", (status) => {
    show(status);
    times -= 1;
    if (!times) statuses.cancel();
  });
  statuses.on("error", (error) => error.code === grpc.status.CANCELLED || fail(error));
}

if (verb === "watch") watch(Number(value ?? Infinity));
else if (verb === "health") ask(new Health(address, plain), "Check", { service: value ?? "" });
else if (verb === "pause") ask(control, "Pause", { for_s: Number(value ?? 0), reason: "asked to pause" });
else ask(control, verb[0].toUpperCase() + verb.slice(1));
