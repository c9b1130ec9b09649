// Nothing here may leave the machine: a socket to anywhere but loopback is an error.
import net from "node:net";

const connect = net.Socket.prototype.connect;
net.Socket.prototype.connect = function (...given) {
  const [first, second] = Array.isArray(given[0]) ? given[0] : given;
  const host = typeof first === "object" ? first.host : typeof second === "string" ? second : undefined;
  if (host !== undefined && !["127.0.0.1", "localhost", "::1"].includes(host)) {
    throw new Error(`a client called ${host}`);
  }
  return connect.apply(this, given);
};
